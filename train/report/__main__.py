"""``python -m train.report RUN_DIR``: write the report of a run anew, from all of its metrics; print its path."""

import sys
from collections.abc import Sequence
from pathlib import Path

from data.output import run_command
from train.report import write_report


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status: 0 done, 1 the folder has no metrics, 2 other arguments were given."""
    if len(arguments) != 1:
        print("usage: python -m train.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        print(write_report(Path(arguments[0]), rebuild=True))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
