"""Mistakes of balanced expert parallelism: lent weights, returned gradients, rows computed away from home."""

import dataclasses
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from model.seams import ExpertWeights, Received
from tests.certify.mutation import BALANCED, Mutate, Mutation


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def with_lent(original: Mutate, loan: Any, lent: list[list[int]], *args: Any) -> Any:
    """The original, where ``lent`` says which home experts went to which rank."""
    with patch.object(loan, "lent", lent):
        return original(loan, *args)


def neighbours(loan: Any) -> list[list[int]]:
    home = loan.home.gate.shape[0]
    return [[(expert + 1) % home for expert in experts] for experts in loan.lent]


def sizes(lent: list[list[int]]) -> list[int]:
    return [len(experts) for experts in lent]


class LendByEarlierPlan:
    """Lends what the layer's exchange before this one lent, where that is as much."""

    def __init__(self) -> None:
        self.earlier: dict[int, list[list[int]]] = {}

    def __call__(self, original: Mutate, loan: Any) -> None:
        layer = loan.home.gate.data_ptr()
        stale, self.earlier[layer] = self.earlier.get(layer, loan.lent), loan.lent
        with_lent(original, loan, stale if sizes(stale) == sizes(loan.lent) else loan.lent)


class LendAgainByLatestPlan:
    """In backward, lends what the layer's latest forward pass lent, where that is as much."""

    def __init__(self) -> None:
        self.latest: dict[int, list[list[int]]] = {}

    def __call__(self, original: Mutate, loan: Any) -> None:
        layer = loan.home.gate.data_ptr()
        if not in_backward():
            self.latest[layer] = loan.lent
        latest = self.latest[layer]
        with_lent(original, loan, latest if sizes(latest) == sizes(loan.lent) else loan.lent)


class LendFirstWeights:
    """Lends the weights that the layer had when it first lent any."""

    def __init__(self) -> None:
        self.first: dict[int, ExpertWeights] = {}

    def __call__(self, original: Mutate, loan: Any) -> None:
        copies = ExpertWeights(*(weight.detach().clone() for weight in loan.home))
        first = self.first.setdefault(loan.home.gate.data_ptr(), copies)
        with patch.object(loan, "home", first):
            original(loan)


class ReturnLate:
    """Holds returned gradients back until the step's reductions are done."""

    def __init__(self) -> None:
        self.held: list[tuple[ExpertWeights, ExpertWeights]] = []

    def hold(self, original: Mutate, loan: Any, gradients: ExpertWeights) -> ExpertWeights:
        home = original(loan, gradients)
        self.held.append((loan.home, home))
        return ExpertWeights(*map(torch.zeros_like, home))

    def add(self, original: Mutate, data_parallel: Any) -> None:
        original(data_parallel)
        for weights, gradients in self.held:
            for weight, gradient in zip(weights, gradients):
                name, total = data_parallel._place[weight]
                total.add(name, gradient)
        self.held.clear()


LATE = ReturnLate()


def lend_neighbours(original: Mutate, loan: Any) -> None:
    with_lent(original, loan, neighbours(loan))


def return_to_neighbours(original: Mutate, loan: Any, gradients: ExpertWeights) -> ExpertWeights:
    return with_lent(original, loan, neighbours(loan), gradients)


def return_in_another_order(original: Mutate, loan: Any, gradients: ExpertWeights) -> ExpertWeights:
    reverse = loan.axis.rank == 1
    return with_lent(original, loan, [experts[::-1] if reverse else experts for experts in loan.lent], gradients)


def return_nothing(original: Mutate, loan: Any, gradients: ExpertWeights) -> ExpertWeights:
    return original(loan, ExpertWeights(*map(torch.zeros_like, gradients)))


def forget_one(original: Mutate, loan: Any, gradients: ExpertWeights) -> ExpertWeights:
    return original(loan, ExpertWeights(*(torch.cat([g[:1] * 0, g[1:]]) for g in gradients)))


def return_twice(original: Mutate, loan: Any, gradients: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(2 * gradient for gradient in original(loan, gradients)))


def return_in_bf16(original: Mutate, loan: Any, gradients: ExpertWeights) -> ExpertWeights:
    return original(loan, ExpertWeights(*(gradient.bfloat16() for gradient in gradients)))


def borrow_in_another_order(original: Mutate, loan: Any) -> ExpertWeights:
    return ExpertWeights(*(weight.flip(0) for weight in original(loan)))


def find_an_empty_pool_in_backward(original: Mutate, loan: Any) -> ExpertWeights:
    borrowed = original(loan)
    return ExpertWeights(*map(torch.zeros_like, borrowed)) if in_backward() else borrowed


def overwrite_after_one_product(original: Mutate, loan: Any) -> ExpertWeights:
    borrowed = original(loan)
    if not in_backward():
        return borrowed
    read = ExpertWeights(*(weight.clone() for weight in borrowed))
    loan._pool.zero_()
    return read


def leave_guests_padding_unwritten(original: Mutate, self: Any, handle: Any) -> tuple[Received, ...]:
    own, *guests = original(self, handle)
    place = handle.planned.place
    padding = (place.source[handle.planned.home_rows :] == place.target.numel()).unsqueeze(1)
    return own, *(part._replace(rows_RL=part.rows_RL.masked_fill(padding, torch.nan)) for part in guests)


def weigh_guests_twice(original: Mutate, self: Any, rows: Tensor, routing: Any, handle: Any) -> Tensor:
    planned = handle.planned
    computed_on = torch.arange(self.axis.size).repeat_interleave(torch.tensor(planned.part.send))[planned.sort.target]
    away = computed_on.view_as(routing.expert_TK) != routing.expert_TK // (self.experts // self.axis.size)
    weights = torch.where(away, routing.weight_TK**2, routing.weight_TK)
    return original(self, rows, dataclasses.replace(routing, weight_TK=weights), handle)


EXPERT_GRADIENT = "gradient of *.experts.*: error *"

BALANCED_EXPERTS = (
    Mutation(
        id="lent-by-an-earlier-plan",
        sentence="A pass lends the experts that the pass before it lent.",
        source="https://github.com/pytorch/torchtitan/issues/1117",
        mesh=BALANCED,
        target="parallel.expert.weights:Loan.start",
        mutate=LendByEarlierPlan(),
        shows="loss of step 1: error *",
    ),
    Mutation(
        id="lent-again-by-the-latest-plan",
        sentence="Backward lends by the plan of the microbatch that came forward last, not by its own.",
        source="https://github.com/NVIDIA/Megatron-LM/pull/7425",
        mesh=(*BALANCED, "parallel.pp=2"),
        target="parallel.expert.weights:Loan.start",
        mutate=LendAgainByLatestPlan(),
        shows="gradient of *: error *",
    ),
    Mutation(
        id="lent-before-the-step",
        sentence="Copies of hot experts are kept, and the optimizer moves on without them.",
        source="https://github.com/PrimeIntellect-ai/prime-rl/pull/3583",
        mesh=BALANCED,
        target="parallel.expert.weights:Loan.start",
        mutate=LendFirstWeights(),
        shows="loss of step 2: error *",
    ),
    Mutation(
        id="neighbour-lent",
        sentence="Rows find the weights of another expert than theirs in the borrowed slot.",
        source="https://github.com/vllm-project/vllm/pull/41141",
        mesh=(*BALANCED, "parallel.zero=2"),
        target="parallel.expert.weights:Loan.start",
        mutate=lend_neighbours,
        shows="loss of step 1: error *",
    ),
    Mutation(
        id="borrowed-in-another-order",
        sentence="Borrowed experts meet the segments in another order than the plan's.",
        source="https://github.com/sgl-project/sglang/pull/34874",
        mesh=BALANCED,
        target="parallel.expert.weights:Loan.borrowed",
        mutate=borrow_in_another_order,
        shows="loss of step 1: error *",
    ),
    Mutation(
        id="not-fetched-again",
        sentence="Another layer has used the borrowed slots since, and backward does not fetch the weights again.",
        source="https://github.com/MoonshotAI/MoonEP/issues/21",
        mesh=(*BALANCED, "parallel.zero=2"),
        target="parallel.expert.weights:Loan.borrowed",
        mutate=find_an_empty_pool_in_backward,
        shows="gradient of *.ffn.down.weight: error *",
    ),
    Mutation(
        id="released-too-early",
        sentence="The borrowed slots are written to again after the first of the three products of backward.",
        source="https://github.com/MakazhanAlpamys/Soup/issues/331",
        mesh=BALANCED,
        target="parallel.expert.weights:Loan.borrowed",
        mutate=overwrite_after_one_product,
        shows="gradient of *.ffn.down.weight: error *",
    ),
    Mutation(
        id="returned-after-the-reduction",
        sentence="Gradients of borrowed experts come home when data-parallel ranks have summed theirs already.",
        source="https://github.com/deepspeedai/DeepSpeed/pull/7985",
        mesh=(*BALANCED, "parallel.cp=2"),
        target="parallel.expert.weights:Loan.return_gradients",
        mutate=LATE.hold,
        also=(("parallel.data:DataParallel.finish", LATE.add),),
        shows=EXPERT_GRADIENT,
    ),
    Mutation(
        id="never-returned",
        sentence="The rank that borrowed an expert keeps its gradient.",
        source="https://github.com/huggingface/transformers/pull/48205",
        mesh=(*BALANCED, "parallel.zero=2"),
        target="parallel.expert.weights:Loan.return_gradients",
        mutate=return_nothing,
        shows=EXPERT_GRADIENT,
    ),
    Mutation(
        id="one-borrowed-expert-forgotten",
        sentence="All borrowed experts but the first return their gradients.",
        source="https://github.com/vllm-project/vllm-ascend/pull/5311",
        mesh=(*BALANCED, "recompute.policy=full"),
        target="parallel.expert.weights:Loan.return_gradients",
        mutate=forget_one,
        shows=EXPERT_GRADIENT,
    ),
    Mutation(
        id="returned-to-the-neighbour",
        sentence="A returned gradient is added to the home expert beside the one that was lent.",
        source="https://github.com/NVIDIA/Megatron-LM/pull/6080",
        mesh=(*BALANCED, "recompute.policy=full"),
        target="parallel.expert.weights:Loan.return_gradients",
        mutate=return_to_neighbours,
        shows=EXPERT_GRADIENT,
    ),
    Mutation(
        id="added-in-another-order-on-one-rank",
        sentence="One home rank takes returned gradients in another order than the borrowers sent them.",
        source="https://github.com/pytorch/torchtitan/pull/4751",
        mesh=BALANCED,
        target="parallel.expert.weights:Loan.return_gradients",
        mutate=return_in_another_order,
        shows=EXPERT_GRADIENT,
    ),
    Mutation(
        id="returned-twice",
        sentence="Gradients of borrowed experts are added at home twice, as if both ranks had computed all rows.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/6660",
        mesh=(*BALANCED, "parallel.pp=2"),
        target="parallel.expert.weights:Loan.return_gradients",
        mutate=return_twice,
        shows=EXPERT_GRADIENT,
    ),
    Mutation(
        id="returned-in-bf16",
        sentence="Gradients of borrowed experts travel in bf16.",
        source="https://github.com/pytorch/pytorch/issues/190626",
        mesh=BALANCED,
        target="parallel.expert.weights:Loan.return_gradients",
        mutate=return_in_bf16,
        shows=EXPERT_GRADIENT,
    ),
    Mutation(
        id="guests-padding-unwritten",
        sentence="The rows that pad a borrowed expert's segment are left as the memory was.",
        source="https://github.com/pytorch/pytorch/issues/193633",
        mesh=BALANCED,
        target="parallel.expert.dispatch:AllToAllDispatcher.receive",
        mutate=leave_guests_padding_unwritten,
        shows="step 1 was skipped: not finite",
    ),
    Mutation(
        id="guests-weighed-twice",
        sentence="Rows that are computed away from home are scaled by the router's weights there and at combine.",
        source="https://github.com/kvcache-ai/sglang/pull/86",
        mesh=BALANCED,
        target="parallel.expert.dispatch:AllToAllDispatcher.combine",
        mutate=weigh_guests_twice,
        shows="loss of step 1: error *",
    ),
)
