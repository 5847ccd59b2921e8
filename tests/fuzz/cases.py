"""Random cases against one rank, each named by its seed.

step    a random model, data and optimizer: one step on a random mesh of 2, 4 or 8 ranks in fp64; every value of
        every parameter, its gradient, update and state are those of one rank (`train.proof.parity`)
run     whole runs by the command: straight on one rank, and in three legs on three random meshes of 4 ranks, each
        resumed from the checkpoint of the one before; losses, samples, texts and the last checkpoint are equal
"""

import io
import tempfile
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random

from torch import Tensor

from launch.train import main as train
from model.kimi import KimiModel
from model.params import named_roles
from tests.dist.parity import Case, Outcome
from tests.dist.ranks import Pools, RankError
from tests.dist.test_train import check_equal, train_rank
from tests.fuzz.draw import draw_case
from tests.launch.tiny_run import make_corpus, overrides
from train.proof.parity import compare, merge, train_alone, train_on_mesh

TOLERANCE = 1e-8
"""Two orders of sums in fp64 differ by some 1e-14, in an unlucky model by 1e-10; a mistake by 1e-3."""

ROUNDING = 1e-7
"""Share of the whole gradient below which a gradient may be rounding alone, whose direction nothing determines."""

RUN_EVERY = 20
"""One case of so many is a run."""

RUN_RANKS = 4
RUN_STEPS = 7


@dataclass(frozen=True)
class Verdict:
    """What came of a case; equal if there are no ``failures``."""

    seed: int
    subject: str
    failures: list[str]


def is_run(seed: int) -> bool:
    """Whether the case of ``seed`` is a run, or else a step."""
    return seed % RUN_EVERY == RUN_EVERY - 1


def judge(seed: int, *, pools: Pools) -> Verdict:
    """Draw the case of ``seed``, do it, compare."""
    r = Random(seed)
    return judge_run(r, seed, pools=pools) if is_run(seed) else judge_step(r, seed, pools=pools)


def judge_step(r: Random, seed: int, *, pools: Pools) -> Verdict:
    ranks = r.choice([2, 4, 4, 8])
    case, mesh = draw_case(r, ranks=ranks)
    rows = f"{len(case.steps[0])} microbatches of {case.steps[0][0].input_ids.shape[1]} tokens"
    subject = f"step of {rows}\n  {mesh}\n  {case.config}\n  {case.optim}\n  {case.recompute}"
    try:
        found = merge(pools.of(ranks).run(train_on_mesh, case, mesh))
    except RankError as error:
        pools.drop(ranks)
        return Verdict(seed, subject, str(error).splitlines())
    return Verdict(seed, subject, differences(case, found, train_alone(case)))


def differences(case: Case, found: Outcome[Tensor], expected: Outcome[Tensor]) -> list[str]:
    """What is not equal. Of a parameter whose gradient is rounding only the gradient counts: Muon makes a whole update
    of whatever it is given."""
    roles = named_roles(KimiModel(case.config))
    (gradients,), (norm,) = expected.gradients, expected.norms
    undetermined = set()
    for name, gradient in gradients.items():
        if roles[name].kind == "matrix":
            matrices = [gradient if gradient.dim() > 2 else gradient.unsqueeze(0), *roles[name].blocks(gradient)]
            least = min(float(x.flatten(1).norm(dim=1).min()) for x in matrices)
        else:
            least = float(gradient.abs()[gradient != 0].min()) if gradient.count_nonzero() else 0.0
        if least < ROUNDING * norm:
            undetermined |= {f"{kind} of {name}" for kind in ("step", "weight", "state")}
    failures = compare(found, expected).failures(TOLERANCE)
    return [failure for failure in failures if failure.split(":")[0] not in undetermined]


def judge_run(r: Random, seed: int, *, pools: Pools) -> Verdict:
    legs = [(steps, draw_run_mesh(r)) for steps in [*sorted(r.sample(range(1, RUN_STEPS), 2)), RUN_STEPS]]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        corpus = make_corpus(root / "corpus")
        options = draw_run(r, corpus=corpus)
        subject = "\n  ".join(["run " + " ".join(options), *(f"{steps} {' '.join(mesh)}" for steps, mesh in legs)])
        try:
            with redirect_stdout(io.StringIO()):
                assert train(overrides(root / "straight", corpus, *options, f"train.steps={RUN_STEPS}")) == 0
            for steps, mesh in legs:
                arguments = overrides(root / "moved", corpus, *options, *mesh, f"train.steps={steps}")
                assert pools.of(RUN_RANKS).run(train_quietly, arguments) == [0] * RUN_RANKS
            check_equal(root / "moved", root / "straight", step=RUN_STEPS)
        except RankError as error:
            pools.drop(RUN_RANKS)
            return Verdict(seed, subject, str(error).splitlines())
        except AssertionError as error:
            return Verdict(seed, subject, (str(error) or traceback.format_exc()).splitlines())
    return Verdict(seed, subject, [])


def train_quietly(arguments: list[str]) -> int:
    """On a rank."""
    with redirect_stdout(io.StringIO()):
        return train_rank(arguments)


def draw_run(r: Random, *, corpus: Path) -> list[str]:
    """Overrides that hold for the whole run: a blend of two sources that come to their ends, a small model."""
    sources = ",".join(f"{{path: {corpus}, weight: {weight}}}" for weight in (r.choice([1, 3.7]), 1.3))
    return [
        f"model.layers={r.choice(['KM', 'KKM', 'MKKM', 'KMKMK'])}",
        f"model.tie_embeddings={r.choice(['true', 'false'])}",
        f"model.residual_block={r.choice([1, 2, 3, 5, 'null'])}",
        f"model.moe.balancing={r.choice(['quantile', 'sign'])}",
        f"optim.qk_clip={r.choice([0.0, 0.3])}",
        f"optim.clip_norm={r.choice([0.2, 1.0])}",
        "optim.lr=1e-3",
        f"data.sources=[{sources}]",
        "batch.sequences=8",
        f"batch.microbatch={r.choice([1, 2])}",
        "train.precision=fp64",
        "train.replica_check_every=1",
        "evaluate.every=3",
        "checkpoint.every=2",
        f"checkpoint.asynchronous={r.choice(['true', 'false'])}",
    ]


def draw_run_mesh(r: Random) -> list[str]:
    """Overrides that hold for one leg."""
    tp, pp, cp = 8, 1, 1
    while RUN_RANKS % (tp * pp * cp):
        tp, pp, cp = (r.choice([1, 1, 2]) for _ in range(3))
    ep = r.choice([size for size in (1, 2, 4) if RUN_RANKS // (tp * pp) % size == 0])
    return [
        f"parallel.tp={tp}",
        f"parallel.pp={pp}",
        f"parallel.cp={cp}",
        f"parallel.ep={ep}",
        f"parallel.zero={r.choice([1, 2])}",
        f"parallel.schedule={r.choice(['auto', 'zero_bubble'])}",
        f"parallel.experts.dispatcher={r.choice(['all_to_all', 'balanced'])}",
        f"recompute.policy={r.choice(['none', 'selective', 'full'])}",
    ]
