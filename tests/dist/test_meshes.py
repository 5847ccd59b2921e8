"""Every axis at two, every pair of axes, and three together: the released code's tiny model on each as on one rank.

One step in fp64 with packed documents and microbatches of 24, 2, 17 and no labelled tokens. Compared with one rank:
loss, gradient norm, expert loads, router biases, and of every parameter its first value, its gradient, what the step
made of it and the optimizer's state; copies must be equal to the bit (`train.proof.parity`).

        tp   pp   ep   cp   dp      a row names the axes; experts are spread over dp x cp,
    tp  x    .    .    .    .       so ep comes with dp or lies over cp
    pp       x    .    .    .
    ep            x    .    .       x: two ranks   .: four ranks
    cp                 x    .
    dp                      x

What is special to one axis has its own file: schedules and placements, borders of documents, hostile routings, options
of the optimizer, other families of models.
"""

import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from train.proof.case import make_microbatch
from model.hf_map import from_hf
from model.kimi import KimiModel
from model.loss import IGNORE_INDEX
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from tests.dist.parity import Case, Outcome, check_parity, run_alone, run_on_mesh
from tests.dist.ranks import RankPool
from tests.model.test_oracles import load

# Clips gradients and attention logits, in many buckets.
OPTIM = OptimConfig(clip_norm=0.05, ns_dtype="fp64", bucket_mb=0.01, qk_clip=0.1)
MICROBATCHES = 4

TWO = {
    "tp": ParallelConfig(tp=2),
    "pp": ParallelConfig(pp=2),
    "ep": ParallelConfig(dp=2, ep=2),
    "cp": ParallelConfig(cp=2),
    "dp": ParallelConfig(dp=2),
}
FOUR = {
    "tp-pp": ParallelConfig(tp=2, pp=2, vpp=2),
    "tp-ep": ParallelConfig(tp=2, dp=2, ep=2),
    "tp-cp": ParallelConfig(tp=2, cp=2),
    "tp-dp": ParallelConfig(tp=2, dp=2, zero=2),
    "pp-ep": ParallelConfig(pp=2, vpp=2, dp=2, ep=2),
    "pp-cp": ParallelConfig(pp=2, vpp=2, cp=2),
    "pp-dp": ParallelConfig(pp=2, dp=2),
    "ep-cp": ParallelConfig(cp=2, dp=2, ep=2),
    "ep-cp-over_both": ParallelConfig(cp=2, dp=2, ep=4, zero=2),
    "ep-dp": ParallelConfig(dp=4, ep=2),
    "cp-dp": ParallelConfig(cp=2, dp=2),
    "tp-ep-cp": ParallelConfig(tp=2, cp=2, ep=2),
}
EIGHT = {
    "tp-pp-ep": ParallelConfig(tp=2, pp=2, dp=2, ep=2),
    "cp-pp-dp": ParallelConfig(cp=2, pp=2, vpp=2, dp=2),
}
MESHES = TWO | FOUR | EIGHT

# What each axis must have moved, so that none is left out unnoticed.
MOVED = {"tp": "tp all_gather", "pp": "pp send", "ep": "ep all_to_all", "cp": "cp all_gather"}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(2) as two, RankPool(4) as four, RankPool(8) as eight:
        yield {2: two, 4: four, 8: eight}


def oracle() -> KimiModel:
    """k3_tiny without the last token of its vocabulary of 97, which two ranks cannot share."""
    config, params, _ = load("k3_tiny")
    whole = from_hf(config, params, dtype=torch.float64)
    model = KimiModel(dataclasses.replace(whole.config, vocab_size=96)).to(torch.float64)
    cut = {name: whole.state_dict()[name][:96] for name in ("embed.weight", "head.weight")}
    model.load_state_dict(whole.state_dict() | cut)
    return model


@functools.cache
def case() -> Case:
    model = oracle()
    step = tuple(make_microbatch(index, config=model.config) for index in range(MICROBATCHES))
    return Case(model.config, dict(model.state_dict()), (step,), OPTIM)


@functools.cache
def alone() -> Outcome[Tensor]:
    return run_alone(case())


def test_the_case_is_no_easy_one() -> None:
    (step,) = case().steps
    labelled = [int((microbatch.labels != IGNORE_INDEX).sum()) for microbatch in step]
    assert min(labelled) == 0
    assert max(labelled) >= 20
    assert len(set(labelled)) == MICROBATCHES
    assert any(len(microbatch.cu_seqlens) > 4 for microbatch in step)
    assert alone().norms[0] > OPTIM.clip_norm
    assert set(alone().updates) == {name for name, _ in oracle().named_parameters()}
    unclipped = run_alone(dataclasses.replace(case(), optim=dataclasses.replace(OPTIM, qk_clip=0.0)))
    assert any(not torch.equal(alone().updates[name], x) for name, x in unclipped.updates.items())


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_rank(pools: dict[int, RankPool], name: str) -> None:
    mesh = MESHES[name]
    ranks = 2 if name in TWO else 4 if name in FOUR else 8
    found = run_on_mesh(pools[ranks], case(), mesh)
    check_parity(found, alone())
    for axis, collective in MOVED.items():
        assert (collective in found.traffic) == (getattr(mesh, axis) > 1), collective
    assert ("replicas reduce" in found.traffic) == (max(mesh.tp, mesh.cp, mesh.dp) > 1)
