"""A checkpoint of any mesh loads on any other: 16 pairs of layouts in which every axis is source and target.

One step is trained, so that nothing saved is at its first value, in bf16, so that there are fp32 masters too. Then each
layout saves and two others load: weights, optimizer state and router biases, put together from all ranks, must be
those saved, and so must random state, token clock and data position. What is missing is fatal and named.

Files that are damaged, and saves that fail, are in tests/train/test_checkpoint_faults.py; runs that go on elsewhere in
tests/dist/test_train.py.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import DataPosition
from train.proof.case import make_microbatch
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.mesh import Mesh, make_mesh
from parallel.sharding import TensorSlice
from tests.dist.parity import Case, gather
from tests.dist.ranks import RankError, RankPool
from tests.model.tiny import tiny_model
from train.checkpoint import CheckpointError, CheckpointStore
from train.checkpoint.contents import Progress, checkpoint_tensors, resume
from train.proof.parity import build, held, train

pytestmark = pytest.mark.slow  # runs on many meshes

LAYOUTS = {
    "one": ParallelConfig(),
    "dp4-zero2": ParallelConfig(dp=4, zero=2),
    "dp2-cp2-ep2": ParallelConfig(dp=2, cp=2, ep=2),
    "cp2-dp2-ep4-zero2": ParallelConfig(cp=2, dp=2, ep=4, zero=2),
    "tp2-dp2-ep2": ParallelConfig(tp=2, dp=2, ep=2),
    "tp2-pp2-vpp2": ParallelConfig(tp=2, pp=2, vpp=2),
    "pp4": ParallelConfig(pp=4),
    "pp2-v-dp2-zero2": ParallelConfig(pp=2, vpp=2, placement="v", layout=[1, 2, 1, 1], dp=2, zero=2),
}
TARGETS = {
    # Further down the list above, from its end on with its beginning: each layout is a target twice.
    name: [list(LAYOUTS)[(place + step) % len(LAYOUTS)] for step in (1, 3)]
    for place, name in enumerate(LAYOUTS)
}
AXES = ("tp", "pp", "vpp", "ep", "cp", "dp")
# Not what any counter starts with.
PROGRESS = Progress(
    DataPosition(3, (4_611_686_018_427_387_905, 17)), step=20, tokens=40_961, learning_rate=0.1 + 0.2, skipped=2
)


@dataclass(frozen=True)
class Held:
    """What one rank holds.

    tensors: weights, optimizer state and router biases, as `train.proof.parity.held`.
    random: state of the CPU's generator.
    """

    tensors: dict[str, TensorSlice]
    random: Tensor
    progress: Progress
    buckets: int


@functools.cache
def case() -> Case:
    model = tiny_model("k3", dtype=torch.bfloat16)
    steps = (tuple(make_microbatch(index, config=model.config) for index in range(4)),)
    return Case(model.config, dict(model.state_dict()), steps, OptimConfig(bucket_mb=0.01), dtype=torch.bfloat16)


@functools.cache
def mesh_of(name: str) -> Mesh:
    return make_mesh(LAYOUTS[name], dist.get_world_size() if dist.is_initialized() else 1)


def open_store(root: Path, mesh: Mesh) -> CheckpointStore:
    world = mesh.world
    return CheckpointStore(root, rank=world.rank, ranks=world.size, group=world.group, asynchronous=False)


def save(name: str, root: Path, leave_out: Mapping[int, str], add: Mapping[int, str]) -> Held:
    """Train and save; rank r saves all but the tensor ``leave_out[r]``, and besides one called ``add[r]``."""
    mesh = mesh_of(name)
    rig = build(case(), mesh, LAYOUTS[name])
    train(case(), rig)
    torch.manual_seed(100 + mesh.world.rank)
    tensors = checkpoint_tensors(rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=mesh)
    if mesh.world.rank in leave_out:
        tensors.pop(leave_out[mesh.world.rank], None)
    if mesh.world.rank in add:
        tensors[add[mesh.world.rank]] = TensorSlice.whole(torch.zeros(3))
    open_store(root, mesh).save(PROGRESS.step, tensors=tensors, state=PROGRESS.to_state())
    return Held(held(rig), torch.get_rng_state(), PROGRESS, len(rig.dp.plan.buckets))


def load(name: str, root: Path) -> Held:
    """Load into a rig of first values."""
    mesh = mesh_of(name)
    torch.manual_seed(200 + mesh.world.rank)
    blank = replace(case(), values={name: torch.full_like(x, torch.nan) for name, x in case().values.items()})
    rig = build(blank, mesh, LAYOUTS[name])
    progress = resume(open_store(root, mesh), rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=mesh)
    assert progress is not None
    return Held(held(rig), torch.get_rng_state(), progress, len(rig.dp.plan.buckets))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def save_on(pool: RankPool, name: str, root: Path, **changes: Mapping[int, str]) -> list[Held]:
    arguments = name, root, changes.get("leave_out", {}), changes.get("add", {})
    return [save(*arguments)] if name == "one" else pool.run(save, *arguments)


def load_on(pool: RankPool, name: str, root: Path) -> list[Held]:
    return [load(name, root)] if name == "one" else pool.run(load, name, root)


def seeded(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def test_the_layouts_cover_every_axis() -> None:
    for axis in AXES:
        sizes = {getattr(config, axis) for config in LAYOUTS.values()}
        assert min(sizes) <= 1 < max(sizes), axis
        cut = {name for name, config in LAYOUTS.items() if getattr(config, axis) > 1}
        assert any(name in cut and set(TARGETS[name]) - cut for name in LAYOUTS), axis
        assert any(name not in cut and set(TARGETS[name]) & cut for name in LAYOUTS), axis
    assert {config.zero for config in LAYOUTS.values()} == {1, 2}


@pytest.mark.parametrize("saved", LAYOUTS)
def test_loads_on_every_layout_bit_for_bit(tmp_path: Path, pool: RankPool, saved: str) -> None:
    ranks = save_on(pool, saved, tmp_path)
    expected = gather([rank.tensors for rank in ranks])
    kinds = {name.split("/")[0] + "/" + name.split("/")[-1].split(".")[-1] for name in expected}
    assert {"model/weight", "model/bias", "optim/momentum", "optim/exp_avg", "optim/master"} <= kinds
    for name in TARGETS[saved]:
        loaded = load_on(pool, name, tmp_path)
        found = gather([rank.tensors for rank in loaded])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name
        assert all(rank.progress == PROGRESS for rank in loaded)
        assert all(rank.buckets > 4 for rank in loaded)
        for number, rank in enumerate(loaded):
            # A rank without a counterpart keeps its own random numbers.
            assert torch.equal(rank.random, seeded((100 if number < len(ranks) else 200) + number)), (name, number)


EXPERTS = "optim/layers.3.ffn.experts.up/momentum"
WRONG = {
    "missing: a cut one's state": (dict.fromkeys(range(4), EXPERTS), {}, f": lacks {EXPERTS};"),
    "missing: a bias": (dict.fromkeys(range(4), "model/layers.1.ffn.router.bias"), {}, ": lacks model/layers.1.ffn.r"),
    "extra": ({}, {2: "model/layers.9.norm"}, ": holds tensors that nothing asks for: model/layers.9.norm;"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_missing_and_an_extra_tensor_are_fatal_and_named(tmp_path: Path, pool: RankPool, wrong: str) -> None:
    leave_out, add, message = WRONG[wrong]
    save_on(pool, "tp2-pp2-vpp2", tmp_path, leave_out=leave_out, add=add)
    for name in ("tp2-pp2-vpp2", "dp4-zero2"):
        with pytest.raises(RankError) as caught:
            load_on(pool, name, tmp_path)
        assert isinstance(caught.value.__cause__, CheckpointError)
        assert message in str(caught.value.__cause__)
    with pytest.raises(CheckpointError) as alone:
        load_on(pool, "one", tmp_path)
    assert message in str(alone.value)


def test_a_part_that_no_rank_saved_is_fatal_at_once(tmp_path: Path, pool: RankPool) -> None:
    """A tensor parallel rank forgets its half of the columns."""
    with pytest.raises(RankError) as caught:
        save_on(pool, "tp2-pp2-vpp2", tmp_path, leave_out=dict.fromkeys((1, 3), EXPERTS))
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert re.search(f"{re.escape(EXPERTS)} invalid fill tensor-volume: 2048", str(caught.value.__cause__))
    assert list(tmp_path.iterdir()) == []
