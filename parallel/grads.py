"""From reduced gradients to one verdict: the global norm, whether it is finite, and how much to clip.

Every rank gets the same report, so every rank takes the same branch. No parameter is written here: a step that
is not finite leaves all parameters and all optimizer state as they were.

A tied embedding whose two uses lie on two pipeline ranks has half its gradient on each. Their owners (pinned, so that
each knows the other) exchange them here; both then make the same update, and the norm counts it once.
"""

import math
from dataclasses import dataclass

import torch

from parallel.collectives import all_reduce_plain
from parallel.data import DataParallel
from parallel.mesh import Axis


@dataclass(frozen=True)
class GradientReport:
    """Verdict on a step's gradient, equal on all ranks.

    norm: L2 norm over every parameter, before clipping; infinite or NaN if any element is.
    finite: every element is finite, and clipped its square too. If not, skip the update: a second moment that has
        become infinite would stay so, and its weight would never move again.
    clip: factor in (0, 1] for every gradient; 0 when not finite.
    """

    norm: float
    finite: bool
    clip: float


LARGEST = 2.0**63
"""Norm after clipping up to which no square overflows in fp32."""

EMBEDDING = "embed.weight"
"""Name of the embedding, tied or not."""


def finalize(dp: DataParallel, *, clip_norm: float, world: Axis, tied: Axis | None = None) -> GradientReport:
    """Norm over all parameters after `DataParallel.finish`; one collective, one host synchronisation.

    Each parameter, or slice of one, counts once, on its owner, whichever stage it is on. Squares are summed in fp64,
    so that no finite fp32 gradient overflows and the order of summation hardly shows.

    Args:
        dp: the data-parallel gradients.
        clip_norm: largest norm that is passed on unchanged; 0 never clips.
        world: all ranks that hold a part of the model.
        tied: the two ranks that share a tied embedding, where this rank is one of them.
    """
    owned = dp.owned_gradients()
    if tied is not None and EMBEDDING in owned:
        owned[EMBEDDING].copy_(all_reduce_plain(owned[EMBEDDING], tied))
        if tied.rank > 0:
            del owned[EMBEDDING]
    gradients = list(owned.values())
    square = torch.zeros((), dtype=torch.float64, device=dp.device)
    if gradients:
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
        square += torch.stack(norms).square().sum()
    norm = math.sqrt(all_reduce_plain(square, world).item())
    clips = 0 < clip_norm < norm
    if not math.isfinite(norm) or (clip_norm if clips else norm) > LARGEST:
        return GradientReport(norm=norm, finite=False, clip=0.0)
    return GradientReport(norm=norm, finite=True, clip=clip_norm / norm if clips else 1.0)
