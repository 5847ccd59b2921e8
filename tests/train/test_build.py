"""A run goes on with its own data, by content; wherever that lies, in whatever order and scale it is named."""

from pathlib import Path

import pytest

from data.loader import DataConfig, Loader, SourceConfig, open_loader
from tests.data.corpora import write_corpus
from train.build import continue_data, data_identity, data_shares
from train.checkpoint.contents import Progress

SEED = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("corpora")
    for name, first in (("a", 3), ("b", 4), ("moved", 3), ("c", 5)):
        write_corpus(root / name, [[[first + i % 3, 8, 9] * 40 for i in range(60)]], tokenizer="{}")
    return [root / name for name in ("a", "b", "moved", "c")]


def loader(*sources: tuple[Path, float]) -> Loader:
    chosen = [SourceConfig(path=str(folder), weight=weight) for folder, weight in sources]
    return open_loader(DataConfig(sources=chosen), cache=Path("unused"), vocab_size=300, seed=SEED)


def progress_of(made_by: Loader) -> Progress:
    return Progress(made_by.start(), data=data_identity(made_by), shares=data_shares(made_by), step=4)


def samples(of: Loader) -> str:
    return of.step(of.start(), sequences=16, length=8, rank=0, ranks=1, microbatch=1)[2]


def test_a_blend_goes_on_under_other_names_order_and_scale(folders: list[Path]) -> None:
    a, b, moved, _ = folders
    before = loader((a, 1), (b, 2))
    for now in (loader((moved, 1), (b, 2)), loader((b, 2), (a, 1)), loader((b, 1), (moved, 0.5))):
        assert samples(continue_data(progress_of(before), now, seed=SEED)) == samples(before)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ([(3, 1), (1, 2)], "c (content_hash "),
        ([(0, 2), (1, 1)], "a (share of the samples 0.333333 -> 0.666667)"),
        ([(0, 1)], "data.sources (2 source(s) -> 1)"),
        ([(0, 1), (1, 2), (1, 2)], "data.sources (2 source(s) -> 3)"),
    ],
    ids=["content", "weights", "fewer", "more"],
)
def test_other_data_is_refused(folders: list[Path], now: list[tuple[int, float]], message: str) -> None:
    before = progress_of(loader((folders[0], 1), (folders[1], 2)))
    with pytest.raises(ValueError, match="step 4 was trained on other data") as error:
        continue_data(before, loader(*((folders[index], weight) for index, weight in now)), seed=SEED)
    assert message in str(error.value)
    assert str(error.value).endswith("restore the data, or set another run.dir to begin anew")


def test_a_checkpoint_from_before_the_data_was_named_is_taken_as_is(folders: list[Path]) -> None:
    now = loader((folders[3], 1))
    assert continue_data(Progress(now.start(), step=4), now, seed=SEED) is now
