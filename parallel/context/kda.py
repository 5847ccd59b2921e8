"""KDA over a cut sequence: every rank works on its slice at once, then the states are handed on.

Over any stretch of one document the recurrence is affine in the state that enters it:

    S_out = M S_in + S~          o_t = o~_t + R_t S_in

S~ and o~ are what the stretch yields from a zero state, M [K, K] is its transition and R [T, K] how its queries
read what came before. A single kernel call gives all four: the values are widened by K columns of zeros and the
state starts as [0 | I], for the columns of the state never mix. So nothing waits, and nothing is computed twice:

    halo of the convolutions -> kernel on the slice -> gather (S~, M) of all ranks -> S_in, in order -> o += R S_in
                                                       backward: gather dS_in, the same fold in reverse

Only the document that began on an earlier rank is widened (which costs K more columns in the kernel's products
with the state, and one product R S_in); documents that begin in the slice run as on one rank. A document's fold
takes the ranks that the document lies on and no others, so no number of one document ever meets another's.

Shapes: T tokens of the slice, H heads, K key, V value, C channels, W filter width, X = V + K.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.documents import Documents
from model.kda import NORMALIZED
from model.kernels.kda_chunk import kda_chunk
from model.kernels.kda_plan import Plans
from model.precision import compute_dtype
from model.seams import ConvWeights, KDACache, KDACore
from parallel.collectives import all_gather, gather_plain
from parallel.context.layout import SlicedDocuments
from parallel.mesh import Axis


class ContextKDA:
    """`model.seams.KDACore` on a slice of the sequence; decoding with a cache is local.

    Every rank makes the same collectives whatever its documents are: autograd must reach them on all ranks.

    Args:
        local: the core that stood here; it decodes.
        axis: cp.
    """

    def __init__(self, local: KDACore, axis: Axis) -> None:
        self.axis = axis
        self.local = local
        self.prepare: Callable[..., Tensor] = local.prepare

    def __call__(
        self,
        streams: tuple[Tensor, Tensor, Tensor],
        filters: ConvWeights,
        g_BTHK: Tensor,
        beta_BTH: Tensor,
        *,
        gate_bound: float | None = None,
        documents: Documents,
        cache: KDACache | None,
    ) -> Tensor:
        if cache is not None:
            return self.local(streams, filters, g_BTHK, beta_BTH, documents=documents, cache=cache)
        assert isinstance(documents, SlicedDocuments), "context parallel needs the documents of a slice"
        heads = beta_BTH.shape[-1]
        tails = halo(streams, self.axis, width=filters.q.shape[1])
        q, k, v = (
            self.prepare(x, weight, tail, documents.position_BT, heads, normalize)
            for x, weight, tail, normalize in zip(streams, filters, tails, NORMALIZED)
        )
        inputs = q, k, v, g_BTHK, beta_BTH
        continued = documents.continued
        plans = documents.kda_plans
        o_continued, reads_BTHK, segment_HKX = run_affine(
            *(x[:, :continued] for x in inputs), gate_bound=gate_bound, plans=plans
        )
        o_begun = v[:, continued:]
        if continued < documents.length:
            assert documents.cu_seqlens is not None
            offsets = documents.cu_seqlens - continued
            o_begun, state_NHKV = kda_chunk(
                *(x[:, continued:] for x in inputs),
                cu_seqlens=offsets[offsets >= 0],
                gate_bound=gate_bound,
                plans=plans,
            )
            # The last document begins here, so nothing that came before passes through it: M = 0.
            segment_HKX = F.pad(state_NHKV[-1], (0, g_BTHK.shape[-1]))
        first, last = documents.first_rank, documents.last_rank
        entering_HKV = _HandOver.apply(segment_HKX, self.axis, first, last)
        o_continued = o_continued + torch.einsum("bthk,hkv->bthv", reads_BTHK, entering_HKV)
        return torch.cat([o_continued.to(v.dtype), o_begun], dim=1)


def halo(streams: tuple[Tensor, Tensor, Tensor], axis: Axis, *, width: int) -> tuple[Tensor, ...]:
    """The W - 1 inputs before the slice of each stream [1, T, C], zeros before the row's first token.

    A slice shorter than that passes all it has, and the halo reaches over several ranks.
    """
    channels = [x.shape[-1] for x in streams]
    tail = torch.cat([x[:, -(width - 1) :] if width > 1 else x[:, :0] for x in streams], dim=-1)
    before = F.pad(all_gather(tail, axis, dim=1), (0, 0, width - 1, 0))
    return before[:, axis.rank * tail.shape[1] :][:, : width - 1].split(channels, dim=-1)


def run_affine(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate_bound: float | None = None,
    plans: Plans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One stretch of one document as a function of the state that enters it; arguments as for `kda_chunk`, B = 1.

    Returns:
        o~ [1, T, H, V] and R [1, T, H, K] in the compute dtype, so that their sum is rounded once; and S~ and M
        side by side, [H, K, V + K]. Without tokens, M is the identity.
    """
    heads, key = q.shape[2:]
    value = v.shape[-1]
    wide = F.pad(v.to(compute_dtype(v.dtype)), (0, key))
    identity = torch.eye(key, dtype=wide.dtype, device=v.device)
    initial = F.pad(identity, (value, 0)).expand(1, heads, key, value + key)
    if q.shape[1] == 0:
        return *wide.split([value, key], dim=-1), initial[0]
    o, final = kda_chunk(q, k, wide, g, beta, initial_state=initial, gate_bound=gate_bound, plans=plans)
    return *o.split([value, key], dim=-1), final[0]


class _HandOver(torch.autograd.Function):
    """The state that enters a rank's first document, from all ranks' maps (S~ | M) of their last documents.

    forward:   S_{r+1} = M_r S_r + S~_r        over the ranks from where this rank's first document begins
    backward:  G_r = dS_r + M_r^T G_{r+1}      over the ranks to where this rank's last document ends;
               dS~_r = G_{r+1},  dM_r = G_{r+1} S_r^T

    Each direction is one gather. Backward sends the K x V gradients only, and needs no sum over ranks.
    """

    @staticmethod
    def forward(ctx: Any, segment_HKX: Tensor, axis: Axis, first_rank: int, last_rank: int) -> Tensor:
        segments = gather_plain(segment_HKX.unsqueeze(0), axis, dim=0)
        key = segments.shape[2]
        own, through = segments.split([segments.shape[3] - key, key], dim=-1)
        state = torch.zeros_like(own[0])
        for rank in range(first_rank, axis.rank):
            state = torch.baddbmm(own[rank], through[rank], state)
        ctx.save_for_backward(through[axis.rank + 1 : last_rank + 1].clone(), state)
        ctx.axis, ctx.last_rank = axis, last_rank
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_HKV: Tensor) -> tuple[Tensor, None, None, None]:
        through, state = ctx.saved_tensors
        grads = gather_plain(grad_HKV.unsqueeze(0), ctx.axis, dim=0)
        grad = torch.zeros_like(grad_HKV)
        for rank in range(ctx.last_rank, ctx.axis.rank, -1):
            grad = torch.baddbmm(grads[rank], through[rank - ctx.axis.rank - 1].mT, grad)
        return torch.cat([grad, torch.bmm(grad, state.mT)], dim=-1), None, None, None
