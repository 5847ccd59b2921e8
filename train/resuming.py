"""Whether a run folder can be gone on with: asked before any process group starts."""

from dataclasses import asdict
from pathlib import Path

from train.checkpoint.staging import list_candidates
from train.config import RunConfig, differences
from train.run_folder import CHECKPOINTS, CONFIG_FILE, explained, has_progress, read_config


def check_folder(config: RunConfig) -> list[str]:
    """What the config changes of the run in its folder, one line each; empty for a new folder.

    Raises:
        ValueError: the folder was made by another config, or holds steps that no checkpoint covers.
        OSError: it cannot be read.
    """
    folder = Path(config.run.dir)
    with explained(folder):
        saved = read_config(folder)
        if saved is None or not has_progress(folder):
            return []
        checkpoints = list_candidates(folder / CHECKPOINTS)
    if unknown := sorted(str(name) for name in saved.keys() - asdict(config).keys()):
        raise ValueError(
            f"{folder / CONFIG_FILE}: has {', '.join(unknown)}, which no config has; restore it or set another run.dir"
        )
    allowed, refused = differences(saved, config, steps=checkpoints[0].step if checkpoints else 0)
    if refused:
        lines = "\n".join(f"  {line}" for line in refused)
        raise ValueError(
            f"run.dir={folder}: this folder was made by another config; set another run.dir, or take back\n{lines}"
        )
    # A benchmark with forced routing never leaves one.
    if not checkpoints and config.routing.saves:
        raise ValueError(
            f"run.dir={folder}: holds the metrics of a run that left no checkpoint, so nothing of it can be gone on "
            f"with; set another run.dir, or remove {folder / 'metrics.jsonl'} to begin anew here"
        )
    return allowed
