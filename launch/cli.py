"""`perilune COMMAND`: every command, from any folder. Nothing heavy is imported here, so that --help answers at once.

A command is a module, which this process turns into by exec: with the package's own folder ahead of all others and the
current folder not on Python's path at all, so that a train.py or a data/ of the user's is never taken for ours.
``--ranks`` goes through torch's own launcher, as torchrun does.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COMMANDS = {
    "train": ("launch.train", "train a model, or go on with a run"),
    "certify": ("launch.certify", "prove a configuration's mesh equal to one rank, on this machine"),
    "plan": ("launch.plan", "what a configuration costs in operations, memory and traffic"),
    "tokenize": ("data.tokenize", "turn text into a folder to train on"),
    "report": ("train.report", "write a run's report anew"),
}
"""Module and purpose of each."""

LAUNCHER = "launch.start_ranks"

USAGE = """usage: perilune COMMAND [ARGUMENTS]
       perilune train [--ranks N] [--config-dir FOLDER] [--config FILE] [--cfg] [KEY=VALUE ...]

commands (perilune COMMAND --help says more):
{commands}

--ranks N: as many processes on this machine; over several machines: torchrun ... -m launch.train

models (perilune train model=NAME):
{models}

experiments (perilune train experiment=NAME; your own: --config-dir FOLDER with FOLDER/experiment/NAME.yaml):
{experiments}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the command; returns an exit status only where there is none to become."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(usage(), end="")
        return 0 if arguments else 2
    try:
        command = command_line(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *command], environment(os.environ, ranks=LAUNCHER in command))


def command_line(arguments: Sequence[str]) -> list[str]:
    """What Python is given for a command and its arguments.

    Raises:
        ValueError: an unknown command, or ranks that cannot be; one line.
    """
    name, *rest = arguments
    if name not in COMMANDS:
        raise ValueError(f"{name}: unknown command; known are {', '.join(COMMANDS)}")
    module = COMMANDS[name][0]
    if name == "plan":
        # Its --ranks are those of the planned run.
        return ["-P", "-m", module, *rest]
    ranks, rest = take_ranks(rest)
    if ranks is None:
        return ["-P", "-m", module, *rest]
    if name != "train":
        raise ValueError(f"--ranks={ranks}: only train takes it; leave it out")
    launcher = ["-P", "-m", LAUNCHER, "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, "-m", module, *rest]


def take_ranks(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number after ``--ranks`` or in ``--ranks=N``, None without it; and the other arguments.

    Raises:
        ValueError: it is no positive whole number, or given twice.
    """
    ranks, rest, left = None, [], list(arguments)
    while left:
        argument = left.pop(0)
        option, equals, value = argument.partition("=")
        if option != "--ranks":
            rest.append(argument)
            continue
        value = value if equals else (left.pop(0) if left else "")
        if not (value.isascii() and value.isdecimal() and int(value) > 0):
            raise ValueError(f"--ranks={value}: must be a whole number from 1; such as --ranks 2")
        if ranks is not None:
            raise ValueError(f"--ranks={value}: is given twice; give one")
        ranks = int(value)
    return ranks, rest


def environment(given: Mapping[str, str], *, ranks: bool) -> dict[str, str]:
    """The environment of a command: its Python finds this package first, and so do the processes that it starts.

    Args:
        ranks: whether several processes share the machine; each then has one thread unless the user says otherwise.
    """
    paths = [str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    threads = {"OMP_NUM_THREADS": "1"} if ranks else {}
    return {**threads, **given, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def usage() -> str:
    """Commands, models and experiments."""
    return USAGE.format(
        commands=_table({name: purpose for name, (_, purpose) in COMMANDS.items()}),
        models=_table(choices("model")),
        experiments=_table(choices("experiment")),
    )


def choices(group: str) -> dict[str, str]:
    """A config group's choices with how the first comment of their files begins."""
    found = {}
    for path in sorted((ROOT / "configs" / group).glob("*.yaml")):
        comments = (line for line in path.read_text("utf-8").splitlines() if line.startswith("#") and "@" not in line)
        found[path.stem] = re.split(r"[.:] | \(", next(comments, "#").lstrip("# "))[0].rstrip(".")
    return found


def _table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in rows.items())


if __name__ == "__main__":
    sys.exit(main())
