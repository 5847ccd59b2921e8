"""What the launcher's environment says, and who says something first."""

import re

import pytest
import torch.distributed as dist

from launch.world import World

FOUR = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_without_a_launcher_there_is_one_rank() -> None:
    for given in ({}, {"LOCAL_RANK": "", "RANK": ""}):
        world = World.from_environment(given)
        assert (world.rank, world.size, world.local_rank, world.restart) == (0, 1, 0, 0)


def test_what_torchrun_sets_is_read() -> None:
    given = FOUR | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert World.from_environment(given) == World(1, 4, 1, "node0", 29500, True, 2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "x", "RANK='x': must be a whole number of at least 0"),
        ("RANK", "-1", "RANK='-1': must be a whole number"),
        ("RANK", "1.0", "RANK='1.0': must be a whole number"),
        ("RANK", "\u0663", "must be a whole number"),
        ("RANK", "4", "RANK=4 of WORLD_SIZE=4: must lie in 0..WORLD_SIZE - 1"),
        ("WORLD_SIZE", "four", "WORLD_SIZE='four': must be a whole number"),
        ("WORLD_SIZE", "0", "RANK=1 of WORLD_SIZE=0: must lie in"),
        ("LOCAL_RANK", "gpu0", "LOCAL_RANK='gpu0': must be a whole number"),
        ("MASTER_PORT", "http", "MASTER_PORT='http': must be a whole number"),
        ("TORCHELASTIC_RESTART_COUNT", "once", "TORCHELASTIC_RESTART_COUNT='once': must be a whole number"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_a_remedy(name: str, value: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as found:
        World.from_environment(FOUR | {name: value})
    assert str(found.value).endswith("; start the ranks with torchrun, or unset these variables for one rank")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_ranks_that_cannot_find_each_other_are_refused_when_they_meet(name: str) -> None:
    world = World.from_environment({key: value for key, value in FOUR.items() if key != name})
    assert world.is_first("failed")
    with pytest.raises(ValueError, match=f"^{name}: must be set beside WORLD_SIZE=4; start the ranks with torchrun"):
        world.join("gloo", timeout=1)


def test_who_was_first_is_asked_of_the_launchers_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = World(0, 2, address="127.0.0.1", port=store.port)
    assert [world.is_first("failed") for _ in range(3)] == [True, False, False]
    assert [world.is_first("something else") for _ in range(2)] == [True, False]
    # After the launcher has started all ranks again, one of them is the first once more.
    again = World(0, 2, address="127.0.0.1", port=store.port, restart=1)
    assert [again.is_first("failed") for _ in range(2)] == [True, False]


def test_a_rank_that_cannot_ask_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.world.STORE_SECONDS", 0.2)
    assert World(1, 2, address="127.0.0.1", port=9).is_first("failed")
    assert World().is_first("failed")
