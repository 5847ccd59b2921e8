"""Checkpoints: bitwise round trips, isolation from later updates, strict loading, several ranks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.sharding import TensorSlice
from tests.dist.ranks import RankPool
from train.checkpoint import CheckpointConfig, CheckpointError, CheckpointStore, staging
from train.checkpoint.staging import FileEntry


def sample_tensors(seed: int = 0) -> dict[str, Tensor]:
    """One tensor of every kind that a run saves, with awkward values, shapes and strides."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 16, generator=generator)
    weight[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    return {
        "model/layers.0.weight": weight,
        "model/layers.0.bf16": torch.randn(7, 3, generator=generator).bfloat16(),
        "model/layers.0.transposed": torch.randn(5, 6, generator=generator).t(),
        "model/layers.0.slice": torch.randn(8, 8, generator=generator)[2:5, 1:4],
        "optim/step": torch.tensor(seed + 12, dtype=torch.int64),
        "optim/scalar": torch.tensor(0.1, dtype=torch.float64),
        "optim/empty": torch.empty(0, 4),
        "router/bias": torch.randn(64, generator=generator),
        "rng/0/cpu": torch.randint(0, 256, (5056,), dtype=torch.uint8, generator=generator),
    }


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 77) for name, tensor in tensors.items()}


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        left, right = actual[name].contiguous().flatten(), tensor.contiguous().flatten()
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name


@contextmanager
def opened(
    root: Path, *, keep: int = 2, asynchronous: bool = True, rank: int = 0, group: dist.ProcessGroup | None = None
) -> Iterator[CheckpointStore]:
    ranks = 1 if group is None else group.size()
    store = CheckpointStore(root, rank=rank, ranks=ranks, group=group, keep=keep, asynchronous=asynchronous)
    try:
        yield store
    finally:
        store.close()


def save_steps(root: Path, *steps: int, keep: int = 10) -> None:
    """Save `sample_tensors(step)` at each of ``steps``."""
    with opened(root, keep=keep) as store:
        for step in steps:
            store.save(step, tensors=sample_tensors(step), state={"tokens": step * 100})


def folder(root: Path, step: int) -> Path:
    return root / staging.folder_name(step)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_round_trip_is_bitwise(tmp_path: Path, asynchronous: bool) -> None:
    state = {"step": 20, "tokens": 2**53 - 1, "learning_rate": 0.1 + 0.2, "data": {"position": [3, 4]}, "best": None}
    tensors = sample_tensors()
    with opened(tmp_path / "new" / "checkpoints", asynchronous=asynchronous) as store:
        assert store.latest() is None
        store.save(20, tensors=tensors, state=state)
        assert store.latest() == 20
        loaded = blank(tensors)
        addresses = {name: tensor.data_ptr() for name, tensor in loaded.items()}
        assert store.load(20, tensors=loaded) == state
    assert_bitwise(loaded, tensors)
    assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == addresses, "filled in place"


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    saved, loaded = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with opened(tmp_path) as store:
        store.save(1, tensors=dict(saved.named_parameters()), state={})
        store.load(1, tensors=dict(loaded.named_parameters()))
    assert_bitwise(loaded.state_dict(), saved.state_dict())
    assert loaded.weight.requires_grad


def test_names_lists_shapes_and_dtypes(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    with opened(tmp_path) as store:
        names = store.names(1)
    assert {name: (entry.shape, entry.dtype) for name, entry in names.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sample_tensors().items()
    }


def test_later_updates_do_not_leak_into_an_asynchronous_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = CheckpointStore._write_tensors

    def write_late(self: CheckpointStore, staged: Path, tensors: dict[str, TensorSlice]) -> dict[str, FileEntry]:
        assert gate.wait(10)
        return write(self, staged, tensors)

    monkeypatch.setattr(CheckpointStore, "_write_tensors", write_late)
    tensors, state = sample_tensors(), {"data": {"position": 5}}
    with opened(tmp_path) as store:
        store.save(1, tensors=tensors, state=state)
        for tensor in tensors.values():
            tensor.fill_(1)
        state["data"]["position"] = 6
        gate.set()
        loaded = blank(tensors)
        assert store.load(1, tensors=loaded) == {"data": {"position": 5}}
    assert_bitwise(loaded, sample_tensors())


def test_at_most_one_save_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active, most = 0, 0
    write = CheckpointStore._write

    def counted(self: CheckpointStore, step: int, tensors: dict[str, TensorSlice], state: str) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        write(self, step, tensors, state)
        active -= 1

    monkeypatch.setattr(CheckpointStore, "_write", counted)
    with opened(tmp_path, keep=2) as store:
        for step in range(1, 6):
            store.save(step, tensors={"w": torch.full((1000,), step)}, state={})
            assert most <= 1
        store.wait()
    assert most == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda t: t | {"optim/new": torch.zeros(2)}, "lacks optim/new", id="missing"),
        pytest.param(
            lambda t: {("model/renamed" if n == "router/bias" else n): x for n, x in t.items()},
            "lacks model/renamed",
            id="renamed",
        ),
        pytest.param(
            lambda t: t | {"router/bias": torch.zeros(32)},
            r"router/bias is saved as float32\[64\] but float32\[32\] is asked for",
            id="shape",
        ),
        pytest.param(
            lambda t: t | {"router/bias": torch.zeros(64, dtype=torch.bfloat16)},
            r"router/bias is saved as float32\[64\] but bfloat16\[64\] is asked for",
            id="dtype",
        ),
        pytest.param(
            lambda t: {name: x for name, x in t.items() if name != "optim/step"},
            "holds tensors that nothing asks for: optim/step;",
            id="extra",
        ),
    ],
)
def test_load_is_strict_and_changes_nothing_on_error(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], expected: str
) -> None:
    save_steps(tmp_path, 1)
    wanted = change(blank(sample_tensors()))
    before = {name: tensor.clone() for name, tensor in wanted.items()}
    with opened(tmp_path) as store, pytest.raises(CheckpointError, match=expected) as caught:
        store.load(1, tensors=wanted)
    assert "\n" not in str(caught.value)
    assert_bitwise(wanted, before)


def test_unasked_names_are_allowed_by_prefix(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    wanted = {name: tensor for name, tensor in blank(sample_tensors()).items() if not name.startswith("rng/")}
    with opened(tmp_path) as store:
        assert store.load(1, tensors=wanted, ignore=("rng/",)) == {"tokens": 100}


def test_a_step_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    with opened(tmp_path) as store, pytest.raises(CheckpointError, match="checkpoint of step 2: not found"):
        store.load(2, tensors={})


def test_config_errors_name_field_value_rule_and_remedy() -> None:
    assert CheckpointConfig().errors() == []
    assert CheckpointConfig(every=0, keep=1).errors() == []
    errors = CheckpointConfig(every=-1, keep=0).errors()
    assert [error.split(":")[0] for error in errors] == ["checkpoint.every=-1", "checkpoint.keep=0"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@contextmanager
def opened_on_rank(root: Path) -> Iterator[tuple[CheckpointStore, int]]:
    rank = dist.get_rank()
    with opened(root, rank=rank, group=dist.group.WORLD) as store:
        yield store, rank


def owned(rank: int) -> dict[str, Tensor]:
    """A rank's part: its own optimizer state and generator, and the replicated weights."""
    replicated = {name: x for name, x in sample_tensors().items() if name.startswith(("model/", "router/"))}
    own = {f"optim/{rank}.momentum": torch.full((rank + 3,), rank + 0.5)}
    return replicated | own | {f"rng/{rank}/cpu": torch.full((16,), rank, dtype=torch.uint8)}


def _save_owned(root: Path) -> None:
    with opened_on_rank(root) as (store, rank):
        store.save(20, tensors=owned(rank), state={"tokens": 7, "rank": rank})
        # Training's collectives go on while the writer thread uses its own group.
        for value in range(50):
            x = torch.tensor([float(value + rank)])
            dist.all_reduce(x)
            assert x.item() == 2 * value + 1
        store.wait()


def _load_swapped(root: Path) -> None:
    with opened_on_rank(root) as (store, rank):
        expected = owned(1 - rank)
        loaded = blank(expected)
        assert store.latest() == 20
        assert len(store.names(20)) == len(owned(0) | owned(1))
        assert store.load(20, tensors=loaded) == {"tokens": 7, "rank": 0}
    assert_bitwise(loaded, expected)


def test_saved_by_two_ranks_loads_on_one_and_on_two_swapped(tmp_path: Path, pool: RankPool) -> None:
    root = tmp_path / "checkpoints"
    pool.run(_save_owned, root)
    pool.run(_load_swapped, root)
    expected = owned(0) | owned(1)
    loaded = blank(expected)
    with opened(root) as store:
        assert store.latest() == 20
        store.load(20, tensors=loaded)
    assert_bitwise(loaded, expected)
    stored = sum(path.stat().st_size for path in folder(root, 20).glob("*.distcp"))
    unique = sum(tensor.nbytes for tensor in expected.values())
    assert stored < unique + 2500 * len(expected), "a replicated tensor is stored once"


def _fail_on_one_rank(root: Path) -> None:
    with opened_on_rank(root) as (store, rank):
        store.save(1, tensors=owned(rank), state={})
        store.wait()
        if rank == 1:
            store._write_tensors = _raise_disk_full  # type: ignore[method-assign]
        else:
            store._write_tensors = lambda staged, tensors: {}  # type: ignore[method-assign]
        store.save(2, tensors=owned(rank), state={})
        with pytest.raises(CheckpointError, match="save failed on rank 1: No space left on device"):
            store.wait()
        store._write_tensors = CheckpointStore._write_tensors.__get__(store)  # type: ignore[method-assign]
        assert store.latest() == 1
        store.save(3, tensors={"w": torch.zeros(2 + rank)}, state={})
        with pytest.raises(CheckpointError, match=r"tensor w: float32\[2\] on one rank and float32\[3\] on rank 1"):
            store.wait()
        wanted = blank(owned(rank)) | ({"absent": torch.zeros(1)} if rank == 1 else {})
        with pytest.raises(CheckpointError, match="lacks absent"):
            store.load(1, tensors=wanted)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001"]


def _raise_disk_full(staged: Path, tensors: dict[str, Tensor]) -> None:
    raise OSError(28, "No space left on device")


def test_a_failure_on_one_rank_fails_on_all_alike(tmp_path: Path, pool: RankPool) -> None:
    pool.run(_fail_on_one_rank, tmp_path / "checkpoints")


def _save_between_latest_and_load(root: Path) -> None:
    with opened_on_rank(root) as (store, rank):
        store.save(1, tensors=owned(rank), state={})
        assert store.latest() == 1
        store.save(2, tensors=owned(rank), state={})
        loaded = blank(owned(rank))
        store.load(1, tensors=loaded, ignore=("optim/", "rng/"))
    assert_bitwise(loaded, owned(rank))


def test_a_save_between_latest_and_load_is_forgotten_by_all_ranks_alike(tmp_path: Path, pool: RankPool) -> None:
    """Else one rank verifies again, which is collective, while the other loads."""
    pool.run(_save_between_latest_and_load, tmp_path / "checkpoints")
