"""Autograd function of `kda_chunk`: walks the segments of a plan, forward in order and backward in reverse.

Forward keeps for backward the inputs, and of each chunk the state at its start, P, L, the inverse and E: beside the
inputs, K V / C + 3 C + V numbers a token and head. The decays are cheaper to compute again than to keep.
Large temporaries are dropped as soon as they are used: in a pass bound by memory, touching a fresh page costs
more than filling it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels.kda_algebra import Inputs, Saved, Tile, backward_segment, forward_segment
from model.kernels.kda_plan import Plan


class ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        plan: Plan,
        scale: float,
        dtype: torch.dtype,
        tile: Tile,
    ) -> tuple[Tensor, Tensor]:
        state = initial_state.to(dtype)[plan.order].contiguous()
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        q_, k_, v_, g_, beta_ = (x.contiguous() for x in (q, k, v, g, beta.unsqueeze(-1)))
        saved: list[Tensor] = []
        with torch.autocast(q.device.type, enabled=False):
            for segment, move in zip(plan.segments, plan.moves):
                inputs = Inputs.read(move, q_, k_, g_, beta_, dtype, tile)
                o_chunks, kept = forward_segment(
                    segment, inputs, move.read(v_, dtype), state[segment.first_document :], scale
                )
                move.write(o_chunks, o)
                saved += [kept.scores, kept.inverse, kept.error, kept.starts]
        ctx.save_for_backward(q, k, v, g, beta, *saved)
        ctx.plan, ctx.tile, ctx.scale, ctx.dtype, ctx.state_dtype = plan, tile, scale, dtype, initial_state.dtype
        final_state = torch.empty_like(state)
        final_state[plan.order] = state
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, *saved = ctx.saved_tensors
        plan = ctx.plan
        grad_state = grad_final_state.to(ctx.dtype)[plan.order].contiguous()
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta.unsqueeze(-1))]
        q, k, g, beta, grad_o = (x.contiguous() for x in (q, k, g, beta.unsqueeze(-1), grad_o))
        with torch.autocast(q.device.type, enabled=False):
            for index in reversed(range(len(plan.segments))):
                segment, move = plan.segments[index], plan.moves[index]
                inputs = Inputs.read(move, q, k, g, beta, ctx.dtype, ctx.tile)
                grad_rows = inputs.decay.new_empty(*move.shape, 2, v.shape[-1])
                torch.mul(move.read(grad_o, ctx.dtype), ctx.scale, out=grad_rows[:, :, 0])
                kept = Saved(*saved[4 * index : 4 * index + 4])
                by_chunk = backward_segment(segment, inputs, kept, grad_rows, grad_state[segment.first_document :])
                for grad, to in zip(by_chunk, grads):
                    move.write(grad.view(*move.shape, -1), to)
        grad_initial = torch.empty_like(grad_state)
        grad_initial[plan.order] = grad_state
        *grads, grad_beta = grads
        return *grads, grad_beta.squeeze(-1), grad_initial.to(ctx.state_dtype), None, None, None, None
