"""A pipeline rank's part of the model: the same `KimiModel`, with `Absent` wherever another rank holds the module.

Names stay those of the whole model (``layers.5.mixer.q.weight``), so initialisation, checkpoints and optimizer groups
need to know nothing of stages.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from model.kimi import Block, KimiModel


class Absent(nn.Module):
    """Stands for a module that another pipeline rank holds: no parameters, and running it is a mistake."""

    def forward(self, *args: Any) -> Any:
        raise AssertionError("this module is on another pipeline rank")


def keep_part(model: KimiModel, layers: Collection[int], *, first: bool, last: bool) -> None:
    """Leave in ``model`` only what this pipeline rank runs, in place; call it while the model is on the meta device.

    Args:
        layers: indices of the layers to keep.
        first: keep the embedding too.
        last: keep the output mix, norm and head too.
    """
    for index in range(len(model.layers)):
        if index not in layers:
            model.layers[index] = Absent()
    gone = ([] if first else ["embed"]) + ([] if last else ["output_mix", "norm", "head"])
    for name in gone:
        if getattr(model, name) is not None:
            setattr(model, name, Absent())


def held_layers(model: KimiModel) -> tuple[int, ...]:
    """Indices of the layers that this rank holds."""
    return tuple(index for index, layer in enumerate(model.layers) if isinstance(layer, Block))
