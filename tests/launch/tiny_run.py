"""Tiny whole runs for tests: a corpus of made-up functions, a model of a few thousand parameters."""

import json
from pathlib import Path
from typing import Any

from data.corpus import prepare_default_corpus

MODEL = [
    "model.vocab_size=320",
    "model.hidden_dim=32",
    "model.layers=KM",
    "model.dense_dim=48",
    "model.residual_block=2",
    "model.kda.heads=2",
    "model.kda.head_dim=16",
    "model.mla.heads=2",
    "model.mla.q_rank=16",
    "model.mla.kv_rank=16",
    "model.mla.nope_dim=16",
    "model.mla.rope_dim=8",
    "model.mla.value_dim=16",
    "model.moe.experts=8",
    "model.moe.expert_dim=16",
    "model.moe.latent_dim=16",
]


def make_corpus(root: Path) -> Path:
    """A tokenised corpus of 400 short functions."""
    library = root / "library"
    library.mkdir(parents=True)
    for module in range(8):
        functions = [
            f"def function_{module}_{i}(x, y={i % 7}):\n    total = x * {i} + y\n    return total - {module}\n"
            for i in range(50)
        ]
        (library / f"module_{module}.py").write_text("\n".join(functions))
    return prepare_default_corpus(root / "cache", vocab_size=300, library=library)


def overrides(folder: Path, corpus: Path, *more: str) -> list[str]:
    """Arguments of a tiny run in ``folder``; later ones win."""
    given = [
        f"run.dir={folder}",
        f"data.sources=[{{path: {corpus}}}]",
        "data.validation_fraction=0.1",
        "batch.length=32",
        "batch.sequences=4",
        "batch.microbatch=1",
        "schedule.warmup_tokens=640",
        "schedule.total_tokens=5120",
        "evaluate.every=0",
        "evaluate.tokens=256",
        "evaluate.sample_tokens=4",
        "checkpoint.every=0",
        "train.detail_every=10",
        *MODEL,
        *more,
    ]
    # Hydra refuses a key that is given twice.
    return list({argument.split("=", 1)[0]: argument for argument in given}.values())


def read_metrics(folder: Path, *, timings: bool = False) -> list[dict[str, Any]]:
    """Objects of metrics.jsonl, by default without what depends on the clock."""
    clock = set() if timings else {"tokens_per_second", "step_seconds", "mfu"}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]
