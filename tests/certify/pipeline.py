"""Mistakes of pipeline parallelism: the cut, residual rows and their gradients, deferred weight gradients."""

import re
from typing import Any

import torch
from torch import Tensor

from model.loss import IGNORE_INDEX
from tests.certify.data import norm_of_own_gradients
from tests.certify.mutation import ONE, PP, Mutate, Mutation

VPP = (*PP, "parallel.vpp=2")


class ReuseRows:
    """Reads a row as it was for the microbatch before."""

    def __init__(self) -> None:
        self.earlier: dict[int, Tensor] = {}

    def __call__(self, original: Mutate, self_: Any, row: int) -> Tensor:
        value = original(self_, row)
        stale = self.earlier.get(row, value)
        self.earlier[row] = value
        return stale if stale.shape == value.shape else value


def return_no_row_gradient(original: Mutate, self: Any, row: int) -> Tensor:
    return torch.zeros_like(original(self, row))


def overwrite_row_gradient(original: Mutate, self: Any, row: int, gradient: Tensor) -> None:
    if row in self._gradients:
        self.take_gradient(row)
    original(self, row, gradient)


def divide_for_the_metric_only(original: Mutate, self: Any, run: Any, batch: Any, state: Any) -> list[Tensor]:
    return [loss * int((batch.labels != IGNORE_INDEX).sum()) for loss in original(self, run, batch, state)]


def seed_by_place_in_the_stage(original: Mutate, seed: int, name: str) -> int:
    return int(original(seed, re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) % 3}", name)))


def drop_the_remainder(original: Mutate, layers: int, stages: int) -> tuple[int, ...]:
    return (layers // stages,) * stages


def lose_a_deferred_gradient(original: Mutate, self: Any) -> Any:
    return original(self)[1:]


PIPELINE = (
    Mutation(
        id="rows-of-another-microbatch",
        sentence="A stage mixes residual rows that the microbatch before has left on its rank.",
        source="https://github.com/pytorch/torchtitan/pull/4312",
        mesh=PP,
        target="parallel.pipeline.boundary:BankRows.get",
        mutate=ReuseRows(),
        shows="gradient of *",
    ),
    Mutation(
        id="rows-without-gradient",
        sentence="Residual rows are sent forward and their gradients do not come back.",
        source="https://github.com/pytorch/torchtitan/issues/3029",
        mesh=PP,
        target="parallel.pipeline.boundary:BankRows.take_gradient",
        mutate=return_no_row_gradient,
        shows="gradient of embed.weight: *",
    ),
    Mutation(
        id="row-gradients-overwritten",
        sentence="Of a cached row that several virtual stages read, only one reader's gradient returns.",
        source="https://github.com/pytorch/torchtitan/pull/4312",
        mesh=VPP,
        target="parallel.pipeline.boundary:BankRows.add_gradient",
        mutate=overwrite_row_gradient,
        shows="gradient of embed.weight: *",
    ),
    Mutation(
        id="pipeline-loss-not-divided",
        sentence="Backward runs on the microbatch's raw sum; only the reported loss is divided.",
        source="https://github.com/pytorch/torchtitan/issues/2972",
        mesh=PP,
        target="parallel.pipeline.runtime:Pipeline._finish",
        mutate=divide_for_the_metric_only,
        shows="gradient of head.weight: *",
    ),
    Mutation(
        id="stages-begin-alike",
        sentence="Layers are seeded by their place in the stage.",
        source="https://github.com/pytorch/torchtitan/issues/514",
        mesh=PP,
        target="model.params:seed_from_name",
        mutate=seed_by_place_in_the_stage,
        shows="first of layers.4.*",
    ),
    Mutation(
        id="remainder-of-layers-lost",
        sentence="Layers that do not divide over the stages are on none.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/1304",
        mesh=PP,
        target="parallel.pipeline.layout:split_evenly",
        mutate=drop_the_remainder,
        shows="gradient of layers.4.*: missing",
    ),
    Mutation(
        id="norm-of-own-stage",
        sentence="Each stage clips by the norm of its own gradients.",
        source="https://github.com/NVIDIA-NeMo/RL/pull/3788",
        mesh=PP,
        target="parallel.grads:all_reduce_plain",
        mutate=norm_of_own_gradients,
        shows="norms: rank 1 reports *",
    ),
    Mutation(
        id="deferred-gradient-lost",
        sentence="A weight gradient that the zero-bubble schedule put off is never made.",
        source="https://github.com/pytorch/pytorch/issues/161904",
        mesh=(*ONE, "parallel.pp=2", "parallel.schedule=zero_bubble"),
        target="parallel.pipeline.deferred:DeferredGradients.take",
        mutate=lose_a_deferred_gradient,
        shows="gradient of *.weight: *",
    ),
)
