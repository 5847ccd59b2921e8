"""One optimizer step: forward and backward over the microbatches, reduce, check, update.

The loss of a token is divided by the count of labelled tokens of the whole step, over all ranks and
microbatches, before any backward pass: so the gradient is the same however the step is cut.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Microbatch
from model.kimi import KimiModel
from model.loss import IGNORE_INDEX
from model.moe import MoE
from model.router import bias_from_histogram, bias_from_load
from model.stats import ForwardStats
from optim.distributed import ShardedOptimizer
from parallel.collectives import combine_in_place
from parallel.context.layout import TokenSlice, slice_tokens
from parallel.data import DataParallel
from parallel.expert.stats import RowStats
from parallel.grads import finalize
from parallel.mesh import Axis
from parallel.pipeline.runtime import Pipeline
from parallel.pipeline.stage import held_layers, tied_to
from train.balance import row_table


@dataclass(frozen=True)
class StepResult:
    """What one step did, equal on all ranks but for ``rows``.

    loss: mean over the step's labelled tokens, in nats.
    grad_norm: before clipping.
    skipped: the loss or the gradient was not finite, and nothing was updated.
    labels: labelled tokens.
    load: int64 [MoE layers, experts] tokens routed to each expert.
    max_logit: largest attention logit of any head; None where it is not tracked.
    rows: `train.balance.row_table` of this rank.
    """

    loss: float
    grad_norm: float
    skipped: bool
    labels: int
    load: Tensor
    max_logit: float | None
    rows: Tensor


class Stepper:
    """Runs optimizer steps on one model.

    Args:
        pipeline: the model, whose parameters live in ``dp``'s buckets.
        dp: gradients and parameters of the data-parallel group.
        optimizer: updates what this rank owns.
        observe: called with the gradients that this rank owns, complete and before clipping, ahead of each update.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        dp: DataParallel,
        optimizer: ShardedOptimizer,
        observe: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        self.pipeline, self.dp, self.optimizer, self.observe = pipeline, dp, optimizer, observe
        self.model, self.mesh, self.device = pipeline.model, pipeline.mesh, pipeline.device
        self.layers = held_layers(self.model)
        self.tied = tied_to(self.model, mesh=self.mesh)

    def step(self, microbatches: Sequence[Microbatch], *, lr: float) -> StepResult:
        """Consume one step's microbatches of this rank and update the model.

        Args:
            microbatches: at least one; every data-parallel rank calls with its own, the ranks of a pp, cp or tp group
                with the same ones, uncut.
            lr: learning rate of this step.
        """
        config = self.model.config
        tracks_logits = self.optimizer.config.qk_clip > 0 and bool(config.mla_layers)
        stats = ForwardStats(
            config, device=self.device, max_logits=tracks_logits, layers=self.layers, dispatch=RowStats
        )
        count = torch.tensor(sum(int((m.labels != IGNORE_INDEX).sum()) for m in microbatches))
        # Of uncut microbatches, which all pp, cp and tp ranks have.
        labels = int(self._sum(count, self.mesh.dp))
        self.dp.zero_gradients()
        batches = [to_device(m, device=self.device, cp=self.mesh.cp) for m in microbatches]
        total = self.pipeline.train(batches, labels=labels, stats=stats, dp=self.dp)
        self.dp.finish()
        # Every rank must see the same verdict, so the loss is reduced before it is judged.
        loss = self.pipeline.sum_over_ranks(total).item() / max(labels, 1)
        load, max_logit = self._reduce(stats)
        report = finalize(self.dp, clip_norm=self.optimizer.config.clip_norm, world=self.mesh.world, tied=self.tied)
        skipped = not (report.finite and math.isfinite(loss))
        if not skipped:
            gradients = self.dp.owned_gradients()
            if self.observe is not None:
                self.observe(gradients)
            self.optimizer.step(
                gradients,
                lr=lr,
                clip=report.clip,
                max_logits=stats.max_logit if tracks_logits else None,
            )
            update_router_biases(self.model, stats)
        rows = row_table(stats, config.moe_layers)
        return StepResult(loss, report.norm, skipped, labels, load, max_logit if tracks_logits else None, rows)

    def _sum(self, value: Tensor, axis: Axis) -> int | float:
        """Sum of a host scalar over the ranks of ``axis``."""
        value = value.to(self.device)
        combine_in_place(value, axis)
        return value.item()

    def _reduce(self, stats: ForwardStats) -> tuple[Tensor, float]:
        """Counts are summed and logits maximised over the ranks, once a step, all layers together.

        Returns:
            Of the whole model, on every rank: the load [MoE layers, experts] on the host, and the largest logit.
        """
        stage, pp = self.mesh.replicas, self.mesh.pp
        for counts in (stats.load, stats.histogram):
            combine_in_place(counts, stage)
        combine_in_place(stats.max_logit, stage, op=dist.ReduceOp.MAX)
        moe_layers = self.model.config.moe_layers
        load = stats.load.new_zeros(len(moe_layers), stats.load.shape[1])
        load[[moe_layers.index(layer) for layer in stats.moe_layers]] = stats.load
        largest = torch.full((1,), -torch.inf, device=self.device)
        largest = torch.cat([stats.max_logit.flatten(), largest]).max()
        combine_in_place(load, pp)
        combine_in_place(largest, pp, op=dist.ReduceOp.MAX)
        return load.cpu(), float(largest)


def to_device(microbatch: Microbatch, *, device: torch.device, cp: Axis) -> TokenSlice:
    """This rank's slice of a microbatch, where the model runs."""
    ids, labels = microbatch.input_ids.to(device), microbatch.labels.to(device)
    return slice_tokens(ids, labels, microbatch.cu_seqlens, axis=cp)


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
