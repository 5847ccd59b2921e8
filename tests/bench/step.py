"""Where a training step's time goes: ``python -m tests.bench.step``.

Prints tables, judges nothing. Everything that is compared is measured in turns within one run, so that the
ratios hold on a machine whose speed drifts.
"""

import argparse
import dataclasses
import functools
import gc
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from configs.compose import compose_config
from data.loader import DataPosition, Loader, open_loader
from model.config import ModelConfig, MoEConfig
from model.flops import training_flops
from model.kernels.grouped_linear import grouped_linear
from model.kernels.grouped_linear_reference import grouped_linear_reference
from model.kimi import KimiModel
from model.layers import Activation, GatedFFN
from model.loss import chunked_cross_entropy
from model.moe import MoE
from model.params import initialize
from model.precision import set_precision
from model.stats import ForwardStats
from parallel.mesh import Mesh
from train.allocator import keep_freed_memory
from train.build import build_model, build_optimizer
from train.throughput import matmul_rate

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def medians(actions: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each action, taken in turns after one warm-up each."""
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            gc.collect()
            started = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def forward_backward(model: KimiModel, tokens: int, document: int) -> Callable[[], None]:
    """One microbatch of ``tokens`` in documents of ``document`` tokens, statistics counted as in training."""
    ids = torch.randint(1, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    bounds = torch.arange(0, tokens + 1, document)

    def run() -> None:
        stats = ForwardStats(model.config, device=CPU, max_logits=True)
        hidden = model.hidden(ids, bounds, stats=stats)
        (chunked_cross_entropy(hidden, model.head.weight, ids) / tokens).backward()
        for param in model.parameters():
            param.grad = None

    return run


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    return made


def whole_step(config: ModelConfig, *, tokens: int, repeats: int) -> Table:
    """Tokens per second and utilisation of forward and backward, by precision."""
    made = table(f"forward + backward, {tokens} tokens", "precision", "ms", "tokens/s", "GFLOP/s", "matmul", "MFU")
    models = {name: build_model(config, seed=0, dtype=dtype, device=CPU) for name, dtype in DTYPES.items()}
    seconds = medians({n: forward_backward(m, tokens, 512) for n, m in models.items()}, repeats=repeats)
    flops = training_flops(config, length=512)
    for name, dtype in DTYPES.items():
        rate, peak = tokens / seconds[name] * flops, matmul_rate(CPU, dtype)
        made.add_row(
            name,
            f"{seconds[name] * 1e3:.0f}",
            f"{tokens / seconds[name]:,.0f}",
            f"{rate / 1e9:.1f}",
            f"{peak / 1e9:.1f}",
            f"{rate / peak:.1%}",
        )
    return made


def shares(config: ModelConfig, *, tokens: int, repeats: int) -> Table:
    """Attention residuals against the plain residual, and the optimizer against a step of 32k tokens."""
    made = table("shares of the step (fp32)", "part", "ms", "of", "share")
    plain = dataclasses.replace(config, residual_block=None)
    models = [build_model(c, seed=0, dtype=torch.float32, device=CPU) for c in (config, plain)]
    seconds = medians(
        {name: forward_backward(m, tokens, 512) for name, m in zip(("mixed", "plain"), models)}, repeats=repeats
    )
    extra = seconds["mixed"] - seconds["plain"]
    made.add_row(
        "attention residuals",
        f"{extra * 1e3:.1f}",
        f"{seconds['mixed'] * 1e3:.0f} ms, {tokens} tokens",
        f"{extra / seconds['mixed']:.1%}",
    )
    mesh = Mesh()
    dp, optimizer = build_optimizer(models[0], compose_config([]).optim, mesh=mesh)
    gradients = {name: torch.randn_like(value) for name, value in dp.owned_gradients().items()}
    step = medians({"step": lambda: optimizer.step(gradients, lr=1e-4)}, repeats=repeats)["step"]
    whole = seconds["mixed"] * 32768 / tokens + step
    made.add_row("optimizer", f"{step * 1e3:.0f}", f"{whole * 1e3:.0f} ms, 32768 tokens", f"{step / whole:.1%}")
    return made


def experts_against_dense(*, tokens: int, repeats: int) -> Table:
    """64 experts, 4 chosen, against one dense feed-forward of the same active operations.

    Once as the layer of kimi_k3_small (latent, shared experts), once as routed experts alone at full width.
    """
    made = table(
        f"64 experts (top 4) against dense, {tokens} tokens", "layer", "precision", "experts", "dense", "ratio"
    )
    small = compose_config(["model=kimi_k3_small"]).model
    bare = MoEConfig(experts=64, top_k=4, expert_dim=256, latent_dim=None, shared_experts=0)
    for name, moe_config in (("LatentMoE", small.moe), ("routed alone", bare)):
        for precision, dtype in DTYPES.items():
            seconds = medians(expert_pair(small, moe_config, tokens=tokens, dtype=dtype), repeats=repeats)
            made.add_row(
                name,
                precision,
                f"{seconds['experts'] * 1e3:.0f} ms",
                f"{seconds['dense'] * 1e3:.0f} ms",
                f"{seconds['experts'] / seconds['dense']:.2f}",
            )
    return made


def expert_pair(
    config: ModelConfig, moe_config: MoEConfig, *, tokens: int, dtype: torch.dtype
) -> dict[str, Callable[[], None]]:
    """Forward and backward of an expert layer and of the dense layer with as many active operations."""
    dim = config.hidden_dim
    activation = Activation("situ", beta=4.0, linear_beta=25.0)
    moe = MoE(dim, moe_config, activation=activation, norm_eps=1e-5)
    width = moe_config.latent_dim or dim
    active = moe_config.top_k * 3 * width * moe_config.expert_dim
    active += 3 * dim * moe_config.shared_experts * moe_config.expert_dim
    active += 2 * dim * moe_config.latent_dim if moe_config.latent_dim else 0
    dense = GatedFFN(dim, active // (3 * dim), activation=activation)
    for module in (moe, dense):
        initialize(module, seed=0, std=0.02)
        set_precision(module, dtype)
    x = torch.randn(1, tokens, dim, dtype=dtype, requires_grad=True)

    def train(layer: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module) -> None:
        layer(x).backward(torch.ones_like(x))
        module.zero_grad(set_to_none=True)
        x.grad = None

    return {
        "experts": lambda: train(lambda value: moe(value, stats=None), moe),
        "dense": lambda: train(dense, dense),
    }


def grouped_products(*, rows: tuple[int, ...], repeats: int) -> Table:
    """The experts' grouped product (64 of 256 x 256), forward and backward, against a loop over the experts."""
    made = table("grouped product of 64 experts, 256 x 256, fp32", "rows", "grouped", "loop", "ratio")
    for count in rows:
        x = torch.randn(count, 256, requires_grad=True)
        weight = torch.randn(64, 256, 256, requires_grad=True)
        ends = torch.arange(1, 65, dtype=torch.int32) * (count // 64)
        actions = {
            "grouped": functools.partial(product_gradients, grouped_linear, x, weight, ends),
            "loop": functools.partial(product_gradients, grouped_linear_reference, x, weight, ends),
        }
        seconds = medians(actions, repeats=repeats)
        cells = (f"{seconds[name] * 1e3:.1f} ms" for name in actions)
        made.add_row(str(count), *cells, f"{seconds['grouped'] / seconds['loop']:.2f}")
    return made


def product_gradients(product: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor) -> None:
    """Forward and backward of one grouped product."""
    y = product(x, weight, ends)
    torch.autograd.grad(y, (x, weight), torch.ones_like(y))


def loading(loader: Loader, *, length: int, sequences: int, steps: int) -> Table:
    """How fast the loader packs samples, on one core and without prefetching."""
    made = table("loader", "context", "tokens", "s", "tokens/s")
    position: DataPosition = loader.start()
    started = time.perf_counter()
    for _ in range(steps):
        _, position, _ = loader.step(
            position, sequences=sequences, length=length, rank=0, ranks=1, microbatch=sequences
        )
    seconds = time.perf_counter() - started
    tokens = steps * sequences * length
    made.add_row(str(length), f"{tokens:,}", f"{seconds:.2f}", f"{tokens / seconds:,.0f}")
    return made


def first_step(*, cache: str) -> Table:
    """Seconds from the command to the end of its first step, with the corpus already prepared."""
    made = table("first step with a warm cache", "command", "s")
    commands = {
        "python -m launch.train": [sys.executable, "-m", "launch.train"],
        "torchrun --nproc-per-node=2 -m launch.train": [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "launch.train",
        ],
    }  # fmt: skip
    for name, command in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            options = [f"run.dir={folder}/run", f"run.cache={cache}", "train.steps=1", "evaluate.every=0"]
            started = time.perf_counter()
            process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            seconds = None
            for line in process.stdout:
                if line.startswith("step ") and "loss" in line:
                    seconds = time.perf_counter() - started
            assert process.wait() == 0
            assert seconds is not None
            made.add_row(name, f"{seconds:.1f}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kimi_k3_demo")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a microbatch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as in training
    console = Console()
    console.print(f"torch {torch.__version__}, {arguments.threads} thread(s), model {arguments.model}")
    config = compose_config([f"model={arguments.model}"])
    console.print(whole_step(config.model, tokens=arguments.tokens, repeats=arguments.repeats))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"peak memory so far: {peak:,.0f} MiB")
    console.print(shares(config.model, tokens=arguments.tokens, repeats=arguments.repeats))
    console.print(experts_against_dense(tokens=arguments.tokens, repeats=arguments.repeats))
    console.print(grouped_products(rows=(1024, 4096, 16384), repeats=4 * arguments.repeats))
    loader = open_loader(
        config.data, cache=Path(config.run.cache), vocab_size=config.model.vocab_size, seed=config.run.seed
    )
    console.print(loading(loader, length=1024, sequences=64, steps=20))
    console.print(first_step(cache=config.run.cache))


if __name__ == "__main__":
    main()
