"""One optimizer step: forward and backward over the microbatches, reduce, check, update.

The loss of a token is divided by the count of labelled tokens of the whole step, over all ranks and
microbatches, before any backward pass: so the gradient is the same however the step is cut.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Microbatch
from model.kimi import KimiModel
from model.loss import IGNORE_INDEX, chunked_cross_entropy
from model.moe import MoE
from model.router import bias_from_histogram, bias_from_load
from model.stats import ForwardStats
from optim.distributed import ShardedOptimizer
from parallel.context.layout import slice_tokens
from parallel.data import DataParallel
from parallel.grads import finalize
from parallel.mesh import Axis, Mesh
from parallel.pipeline.stage import held_layers


@dataclass(frozen=True)
class StepResult:
    """What one step did, equal on all ranks.

    loss: mean over the step's labelled tokens, in nats.
    grad_norm: before clipping.
    skipped: the loss or the gradient was not finite, and nothing was updated.
    labels: labelled tokens.
    load: int64 [MoE layers, experts] tokens routed to each expert.
    max_logit: largest attention logit of any head; None where it is not tracked.
    """

    loss: float
    grad_norm: float
    skipped: bool
    labels: int
    load: Tensor
    max_logit: float | None


class Stepper:
    """Runs optimizer steps on one model.

    Args:
        model: its parameters live in ``dp``'s buckets.
        dp: gradients and parameters of the data-parallel group.
        optimizer: updates what this rank owns.
        mesh: this rank's place.
        loss_chunk: tokens whose logits exist at once.
    """

    def __init__(
        self, model: KimiModel, *, dp: DataParallel, optimizer: ShardedOptimizer, mesh: Mesh, loss_chunk: int
    ) -> None:
        self.model, self.dp, self.optimizer, self.mesh = model, dp, optimizer, mesh
        self.loss_chunk = loss_chunk
        self.layers = held_layers(model)
        self.device = next(model.parameters()).device

    def step(self, microbatches: Sequence[Microbatch], *, lr: float) -> StepResult:
        """Consume one step's microbatches of this rank and update the model.

        Args:
            microbatches: at least one; every rank calls with its own, the ranks of a cp group with the same ones,
                uncut.
            lr: learning rate of this step.
        """
        tracks_logits = bool(self.optimizer.qk_targets)
        stats = ForwardStats(self.model.config, device=self.device, max_logits=tracks_logits, layers=self.layers)
        count = torch.tensor(sum(int((m.labels != IGNORE_INDEX).sum()) for m in microbatches))
        # Of uncut microbatches, which all cp ranks have.
        labels = int(self._sum(count, self.mesh.dp))
        self.dp.zero_gradients()
        total = torch.zeros((), dtype=torch.float64)
        for index, microbatch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            with self.dp.last_microbatch() if last else contextlib.nullcontext():
                total += self._backward(microbatch, labels, stats)
        self.dp.finish()
        # Every rank must see the same verdict, so the loss is reduced before it is judged.
        loss = float(self._sum(total, self.mesh.dense)) / max(labels, 1)
        self._reduce(stats)
        report = finalize(self.dp, clip_norm=self.optimizer.config.clip_norm, world=self.mesh.world)
        skipped = not (report.finite and math.isfinite(loss))
        if not skipped:
            self.optimizer.step(
                self.dp.owned_gradients(),
                lr=lr,
                clip=report.clip,
                max_logits=stats.max_logit if tracks_logits else None,
            )
            update_router_biases(self.model, stats)
        max_logit = float(stats.max_logit.max()) if tracks_logits else None
        return StepResult(loss, report.norm, skipped, labels, stats.load.cpu(), max_logit)

    def _backward(self, microbatch: Microbatch, labels: int, stats: ForwardStats) -> Tensor:
        """Add the gradients of the rank's slice of a microbatch; returns its sum of losses (fp64, on the host)."""
        ids, targets = microbatch.input_ids.to(self.device), microbatch.labels.to(self.device)
        ids, targets, documents = slice_tokens(ids, targets, microbatch.cu_seqlens, axis=self.mesh.cp)
        hidden = self.model.hidden(ids, documents=documents, stats=stats)
        loss = chunked_cross_entropy(hidden, self.model.head.weight, targets, chunk=self.loss_chunk)
        (loss / max(labels, 1)).backward()
        return loss.detach().double().cpu()

    def _sum(self, value: Tensor, axis: Axis) -> int | float:
        """Sum of a host scalar over the ranks of ``axis``."""
        value = value.to(self.device)
        if axis.group is not None:
            dist.all_reduce(value, group=axis.group)
        return value.item()

    def _reduce(self, stats: ForwardStats) -> None:
        """Counts are summed and logits maximised over the ranks, once a step, all layers together."""
        group = self.mesh.stage.group
        if group is None:
            return
        for counts in (stats.load, stats.histogram):
            if counts.numel():
                dist.all_reduce(counts, group=group)
        if stats.max_logit.numel():
            dist.all_reduce(stats.max_logit, op=dist.ReduceOp.MAX, group=group)


@torch.no_grad()
def update_router_biases(model: KimiModel, stats: ForwardStats) -> None:
    """Move every router's selection bias by the step's global counts; takes effect at the next step.

    Args:
        stats: counts summed over all microbatches and ranks of the step.
    """
    moe = model.config.moe
    for row, layer in enumerate(stats.moe_layers):
        ffn = model.layers[layer].ffn
        assert isinstance(ffn, MoE)
        bias = ffn.router.bias
        if moe.balancing == "quantile":
            bias.copy_(bias_from_histogram(stats.histogram[row], bias, k=moe.top_k))
        elif moe.balancing == "sign":
            bias.copy_(bias_from_load(stats.load[row], bias, step=moe.sign_step))
