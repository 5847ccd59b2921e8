"""A sequence of 262,144 tokens over four context-parallel ranks: ``python -m tests.bench.long_context``.

One step of a tiny model, a KDA and an MLA layer, on gloo ranks of one thread: loss, time and largest resident memory
of each rank. The row is one microbatch of packed documents of 65,536 tokens (``--document``), the first of half of
them, so that every border of a slice lies inside a document.

Attention is quadratic in the document, all else linear in the row. What one document of the whole row would take is
extrapolated from attention alone at growing lengths, and printed too.
"""

import argparse
import resource
import time
from dataclasses import dataclass, replace

import torch

from data.loader import Microbatch
from launch.ranks import RankPool
from model.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from model.documents import Documents
from model.loss import IGNORE_INDEX
from model.mla import LocalAttention
from model.products import DENSE
from model.stats import LayerStats
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.mesh import make_mesh
from parallel.recompute import RecomputeConfig
from train.build import build_model
from train.proof.parity import SEED, Case, build
from train.step import Stepper

LENGTH, DOCUMENT, RANKS = 262_144, 65_536, 4
SMALL = ModelConfig(
    vocab_size=96,
    hidden_dim=16,
    layers="KM",
    dense_dim=16,
    residual_block=2,
    init_std=0.2,
    kda=KDAConfig(heads=1, head_dim=16),
    # A head for each rank.
    mla=MLAConfig(heads=RANKS, q_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=8),
    moe=MoEConfig(experts=4, top_k=2, expert_dim=8, latent_dim=8, shared_experts=1),
)


@dataclass(frozen=True)
class Measured:
    """One step on one rank.

    seconds, cpu_seconds: of the step, by the clock and of this process's work.
    before, peak: largest resident bytes of the process until the step began, and ended.
    """

    loss: float
    grad_norm: float
    seconds: float
    cpu_seconds: float
    before: int
    peak: int


def make_case(
    length: int,
    *,
    document: int,
    layers: str = "KM",
    policy: str = "none",
    dtype: torch.dtype = torch.float32,
) -> Case:
    """One step of one row of ``length`` random tokens.

    Args:
        document: tokens of a document; the first has half of them, unless it has all of the row.
        layers: of the model.
        policy: what is recomputed.
    """
    first = document // 2 if document < length else length
    bounds = torch.tensor([0, *range(first, length, document), length], dtype=torch.int32)
    ids = torch.randint(SMALL.vocab_size, (1, length), generator=torch.Generator().manual_seed(SEED))
    labels = ids.roll(-1, dims=1)
    labels[0, bounds[1:].long() - 1] = IGNORE_INDEX
    sample_ids = torch.tensor([[0, 0, length]]).numpy()
    batch = Microbatch(input_ids=ids, labels=labels, cu_seqlens=bounds, sample_ids=sample_ids)
    config = replace(SMALL, layers=layers)
    model = build_model(config, seed=SEED, dtype=dtype, device=torch.device("cpu"))
    optim = OptimConfig(ns_dtype="fp64" if dtype == torch.float64 else "fp32")
    recompute = RecomputeConfig(policy=policy)
    return Case(config, dict(model.state_dict()), ((batch,),), optim, dtype=dtype, recompute=recompute)


def train_step(case: Case) -> Measured:
    """The case's step on this rank of `RANKS`."""
    config = ParallelConfig(cp=RANKS)
    rig = build(case, make_mesh(config, RANKS), config)
    stepper = Stepper(rig.pipeline, dp=rig.dp, optimizer=rig.optimizer)
    before, began, worked = resident_peak(), time.monotonic(), time.process_time()
    result = stepper.step(case.steps[0], lr=0.01)
    return Measured(
        loss=result.loss,
        grad_norm=result.grad_norm,
        seconds=time.monotonic() - began,
        cpu_seconds=time.process_time() - worked,
        before=before,
        peak=resident_peak(),
    )


def resident_peak() -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attention_seconds(length: int) -> float:
    """CPU seconds of one head's attention, forward and backward, over one document, here and now, on one thread."""
    mla = SMALL.mla
    shapes = {
        "q_BTHQ": (1, length, 1, mla.nope_dim + mla.rope_dim),
        "latent_BTR": (1, length, mla.kv_rank),
        "shared_key_BTP": (1, length, mla.rope_dim),
        "up_weight": (mla.nope_dim + mla.value_dim, mla.kv_rank),
    }
    inputs = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    documents = Documents.of(1, length, None, torch.device("cpu"))
    # QK-Clip wants the largest logit, as in training.
    stats = LayerStats(None, None, torch.full((1,), -torch.inf), None)
    began = time.process_time()
    out = LocalAttention()(
        **inputs, product=DENSE, value_dim=mla.value_dim, documents=documents, stats=stats, cache=None
    )
    out.backward(torch.ones_like(out))
    return time.process_time() - began


def print_attention(longest: int = 32_768) -> None:
    """What attention takes by length, and what a document of the whole row would."""
    torch.set_num_threads(1)
    attention_seconds(1024)
    for length in (longest // 4, longest // 2, longest):
        seconds = attention_seconds(length)
        print(f"attention, one head, one document of {length:,} tokens: {seconds:.1f} s of one core")
    whole = seconds * (LENGTH / longest) ** 2
    print(
        f"one document of {LENGTH:,} tokens (extrapolated, quadratic): {whole:.0f} s of one core a head and layer, so "
        f"{whole / 60:.0f} min a step where each of {RANKS} ranks has a core and a head of its own"
    )


def main() -> None:
    """Train the step, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--document", type=int, default=DOCUMENT)
    parser.add_argument("--layers", default=SMALL.layers, help="K for KDA, M for MLA")
    parser.add_argument("--policy", default="none", help="recomputation: none, selective or full")
    options = parser.parse_args()
    case = make_case(options.length, document=options.document, layers=options.layers, policy=options.policy)
    with RankPool(RANKS, timeout=3600, preload=("train.proof.parity",)) as pool:
        results = pool.run(train_step, case)
    documents = len(case.steps[0][0].cu_seqlens) - 1
    print(
        f"{options.length:,} tokens in {documents} document(s) of at most {options.document:,}, cp={RANKS}, fp32, "
        f"layers {options.layers}, recompute.policy={options.policy}\n"
        f"loss {results[0].loss:.4f}, gradient norm {results[0].grad_norm:.3e}"
    )
    for rank, one in enumerate(results):
        print(
            f"rank {rank}: {one.seconds:.0f} s ({one.cpu_seconds:.0f} of CPU), resident at most "
            f"{one.peak / 2**20:.0f} MiB ({one.before / 2**20:.0f} before the step)"
        )
    if "M" in options.layers:
        print_attention()


if __name__ == "__main__":
    main()
