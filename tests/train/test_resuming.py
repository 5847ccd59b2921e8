"""Whether a run folder can be gone on with, from its files alone; and a run that goes on otherwise than it began."""

from dataclasses import asdict
from pathlib import Path

import pytest

from configs.compose import compose_config
from launch.train import main
from tests.launch.tiny_run import make_corpus, overrides, read_metrics
from train.resuming import check_folder
from train.run_folder import write_config


def make_folder(folder: Path, *given: str, step: int | None) -> None:
    """What a run of the demo leaves: its config, metrics and, unless ``step`` is None, a checkpoint."""
    write_config(folder, asdict(compose_config(list(given))))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    if step is not None:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_a_new_folder_has_nothing_to_go_on_with(tmp_path: Path) -> None:
    assert check_folder(compose_config([f"run.dir={tmp_path / 'new'}"])) == []


def test_steps_without_a_checkpoint_are_not_begun_anew_in_silence(tmp_path: Path) -> None:
    make_folder(tmp_path, step=None)
    with pytest.raises(ValueError, match="left no checkpoint") as error:
        check_folder(compose_config([f"run.dir={tmp_path}"]))
    message = str(error.value)
    assert "set another run.dir, or remove " in message
    # The remedy works.
    (tmp_path / "metrics.jsonl").unlink()
    assert check_folder(compose_config([f"run.dir={tmp_path}"])) == []


def test_a_schedule_is_compared_over_the_steps_of_the_newest_checkpoint(tmp_path: Path) -> None:
    make_folder(tmp_path, step=8)
    longer = compose_config([f"run.dir={tmp_path}", "schedule.total_tokens=900000"])
    assert "schedule.total_tokens: 409600 -> 900000" in check_folder(longer)
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    with pytest.raises(ValueError, match="step 9 was done at"):
        check_folder(longer)


@pytest.mark.slow
def test_another_microbatch_and_longer_schedule_go_on_with_the_same_samples(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    long = ["train.steps=6", "schedule.total_tokens=10240"]
    assert main(overrides(straight, corpus, *long)) == 0
    assert main(overrides(changed, corpus, "train.steps=3")) == 0
    moved = corpus.rename(tmp_path / "moved")
    assert main(overrides(changed, moved, *long, "batch.microbatch=2")) == 0
    one, other = read_metrics(straight), read_metrics(changed)
    for key in ("samples_hash", "tokens", "learning_rate"):
        assert [step[key] for step in one] == [step[key] for step in other]
    assert [step["loss"] for step in one] == pytest.approx([step["loss"] for step in other], rel=1e-3)
