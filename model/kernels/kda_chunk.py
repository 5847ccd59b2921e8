"""Kimi Delta Attention in chunks: the same function as `kda_reference`, as matrix products.

kda_plan      which tokens make up a chunk, which chunks run in one step      indices only
kda_algebra   one segment of chunks: the products, and their gradients        no index, no autograd
kda_autograd  all segments of a plan, and what is kept for backward
here          checks, and the choice between these and the kernels of flash-linear-attention on GPUs
"""

import importlib.util
import itertools

import torch
from torch import Tensor

from model.kernels.kda_algebra import make_tile
from model.kernels.kda_autograd import ChunkKDA
from model.kernels.kda_plan import Plans
from model.kernels.kda_reference import check_kda_inputs


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_bound: float | None = None,
    plans: Plans | None = None,
) -> tuple[Tensor, Tensor]:
    """As `kda_reference`: arguments, results, errors and gradients.

    Args:
        gate_bound: promise that g >= gate_bound at every token and channel, None for none. It saves time and
            changes results by rounding only.
        plans: keeps this call's index plan for further calls with the same documents; None: the plan is made anew.

    Raises:
        ValueError: see `kda_reference`; ``gate_bound`` above 0 or infinite, or a g below it.

    Kept for backward: the inputs, and for each chunk its starting state, scores, inverse and errors. On CUDA
    the kernels of flash-linear-attention run where it is installed, except in fp64, which they do not compute.
    """
    offsets, dtype = check_kda_inputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    batch, length, heads, key = q.shape
    scale = key**-0.5 if scale is None else scale
    if q.is_cuda and dtype == torch.float32 and importlib.util.find_spec("fla") is not None:
        from fla.ops.kda import chunk_kda

        o, final_state = chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=True,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(q.device, torch.int64),
        )
        return o.to(v.dtype), final_state
    if offsets is None:
        offsets = [row * length for row in range(batch + 1)]
    tile = make_tile(gate_bound, g.detach(), max(b - a for a, b in itertools.pairwise(offsets)))
    if initial_state is None:
        initial_state = q.new_zeros(len(offsets) - 1, heads, key, v.shape[-1], dtype=dtype)
    plan = (Plans() if plans is None else plans).get(tuple(offsets), heads=heads, device=q.device)
    return ChunkKDA.apply(q, k, v, g, beta, initial_state, plan, scale, dtype, tile)
