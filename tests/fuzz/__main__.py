"""Random comparisons, any number: ``python -m tests.fuzz --cases 1000 --seed 5000``.

Case i has the seed S + i, which alone names it: a failure is done again by its seed with ``--cases 1``. Exit status: 0
all equal, 1 not.
"""

import argparse
import sys

import torch

from tests.dist.ranks import Pools
from tests.fuzz.cases import is_run, judge

SHOWN = 12
"""Lines of a failure."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random cases on meshes against one rank."
    )
    parser.add_argument("--cases", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow (0)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    done, wrong = {"step": 0, "run": 0}, []
    with Pools(grace=2.0) as pools:
        for seed in range(options.seed, options.seed + options.cases):
            verdict = judge(seed, pools=pools)
            done["run" if is_run(seed) else "step"] += 1
            if verdict.failures:
                wrong.append(seed)
                print(f"seed {seed} FAILED: {verdict.subject}")
                print(*(f"    {line}" for line in verdict.failures[:SHOWN]), sep="\n")
                print(f"again: python -m tests.fuzz --cases 1 --seed {seed}", flush=True)
            if sum(done.values()) % 10 == 0:
                print(f"{done['step']} steps, {done['run']} runs: {len(wrong)} wrong", flush=True)
    print(f"{done['step']} steps and {done['run']} runs from seed {options.seed}: wrong {wrong or 'none'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
