"""``data.tokenize``, stopped between shards until a test lets it go on: ``AFTER FOLDER ARGUMENTS...``.

From shard number AFTER on, a process says ``FOLDER/held`` and waits for ``FOLDER/go``, so that a test which kills or
interrupts the command does so in the middle, however fast or slow the machine is.
"""

import sys
import time
from functools import partial
from pathlib import Path

from data import tokenize

work = tokenize._work


def work_when_let(job: tokenize.Job, *, after: int, folder: Path) -> None:
    """Make a shard; the held ones wait first."""
    if int(job.name.removeprefix("shard-")) >= after:
        (folder / "held").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    work(job)


if __name__ == "__main__":
    from tests.data.held_tokenize import work_when_let as importable

    tokenize._work = partial(importable, after=int(sys.argv[1]), folder=Path(sys.argv[2]))  # type: ignore[assignment]
    sys.exit(tokenize.main(sys.argv[3:]))
