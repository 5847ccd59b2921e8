"""Mistakes of recomputation: what a repeated forward pass must not decide or count again."""

import functools
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.certify.mutation import DP, Mutate, Mutation

FULL = (*DP, "recompute.policy=full")


def decide_every_time(original: Mutate, self: Any, kind: type, make: Mutate) -> Any:
    return make()


def choose_otherwise_in_backward(original: Mutate, scores: Tensor, *args: Any, **options: Any) -> Any:
    experts, cutoff = original(scores, *args, **options)
    in_backward = torch._C._current_graph_task_id() != -1
    # Another token's experts: so the sizes of all products stay what they were.
    return (experts.roll(1, dims=0) if in_backward else experts), cutoff


def hand_statistics_to_the_repetition(original: Mutate, self: Any, block: Any, state: Any, **options: Any) -> Any:
    with patch.object(self, "run", functools.partial(self.run, stats=options["stats"])):
        return original(self, block, state, **options)


RECOMPUTE = (
    Mutation(
        id="repetition-routes-otherwise",
        sentence="The repeated pass breaks ties differently and sends tokens to other experts.",
        source="https://github.com/pytorch/torchtitan/issues/3336",
        mesh=FULL,
        target="model.router:select_experts",
        mutate=choose_otherwise_in_backward,
        also=(("model.router:Decisions.once", decide_every_time),),
        shows="gradient of *.experts.*",
    ),
    Mutation(
        id="repetition-counts",
        sentence="The repeated pass adds its tokens to the routers' statistics.",
        source="https://github.com/pytorch/torchtitan/pull/1593",
        mesh=FULL,
        target="parallel.recompute:_Layer.__call__",
        mutate=hand_statistics_to_the_repetition,
        also=(("model.router:Decisions.once", decide_every_time),),
        shows="expert loads of step 1: *",
    ),
)
