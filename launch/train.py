"""Train: compose and check the config, join the other ranks, run the loop.

    torchrun --nproc-per-node=2 -m launch.train experiment=demo optim.lr=2e-3
    python -m launch.train run.dir=runs/mine train.steps=50

The same command with the same run folder resumes. Exit status: 0 done; 1 the run failed (what was saved is intact);
2 the configuration or data cannot be used; 3 stopped by SIGTERM, Ctrl-C or run.max_minutes, with a checkpoint from
which the same command goes on; 130 ended at once, by Ctrl-C before the first step or by a second one.

This file imports little, so that its first line is there before torch is.
"""

import importlib.metadata
import platform
import sys
import time

from data.output import Output
from launch.failures import DONE, INTERRUPTED, Failures, say, was_interrupted
from launch.world import World

USAGE = """usage: [torchrun --nproc-per-node=N] -m launch.train [OPTIONS] [KEY=VALUE ...]

KEY=VALUE            override a config key or choose a group: train.steps=50, model=kimi_k3_small
--cfg                print the effective config, check it, and exit
--config-dir FOLDER  more choices: FOLDER/experiment/NAME.yaml for experiment=NAME, FOLDER/model/NAME.yaml
--config FILE        start from a whole configuration, such as a run's own config.yaml
"""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status."""
    began = time.monotonic()
    with Output() as output:
        if "--help" in arguments or "-h" in arguments:
            print(USAGE, end="")
            return DONE
        world = World()
        failures = Failures(world, record=output.record)
        try:
            world = World.from_environment()
            failures = Failures(world, record=output.record)
            if world.rank > 0:
                output.quiet()
            if world.rank == 0 and "--cfg" not in arguments:
                announce(world)
            from launch.session import Session, command  # torch takes seconds

            return command(arguments, Session(world, output=output, failures=failures, began=began))
        except KeyboardInterrupt:
            return interrupted(world)
        except BaseException as error:
            if isinstance(error, SystemExit | GeneratorExit):
                raise
            if was_interrupted(error):
                return interrupted(world)
            failures.say(error)
            return failures.status(error)


def announce(world: World) -> None:
    """The first line: what has been started, and what comes next."""
    try:
        version = importlib.metadata.version("perilune")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    again = f", start {world.restart + 1} of its launcher" if world.restart else ""
    print(f"perilune {version} on {platform.node()}, {world.size} rank(s), {now}{again}: loading torch", flush=True)


def interrupted(world: World) -> int:
    """Say once that Ctrl-C ended the command; returns its exit status."""
    if world.is_first("interrupted"):
        say("interrupted: the same command goes on from the last checkpoint, if there is one")
    # What other ranks run into now must not be taken for the first failure.
    world.is_first("failed")
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
