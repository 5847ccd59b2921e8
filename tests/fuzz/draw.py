"""Random models, meshes, batches and optimizers: whatever a config may say at a size that is trained in a moment.

Every draw takes its numbers from one `random.Random`, so that a seed names a case. What a config refuses (a mesh that
does not fit the model) is drawn again.
"""

from random import Random

import numpy as np
import torch

from data.loader import Microbatch
from model.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from model.kimi import KimiModel
from model.loss import IGNORE_INDEX
from model.params import initialize
from model.precision import set_precision
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.expert.config import ExpertsConfig
from parallel.pipeline.layout import layout_errors
from parallel.recompute import RecomputeConfig
from parallel.tensor import cut_errors
from tests.dist.parity import Case


def draw_case(r: Random, *, ranks: int) -> tuple[Case, ParallelConfig]:
    """One step of a random model in fp64, and a mesh of ``ranks`` ranks to do it on."""
    config, mesh = draw_model(r), draw_mesh(r, ranks=ranks)
    while contradictions(config, mesh, ranks=ranks):
        config, mesh = draw_model(r), draw_mesh(r, ranks=ranks)
    length = mesh.cp * mesh.tp * r.choice([1, 2, 3, 5, 9, 20, 20, 40])
    step = tuple(draw_microbatch(r, length=length, vocab_size=config.vocab_size) for _ in range(3 * mesh.dp))
    step = step[: mesh.dp * r.choice([1, 2, 3])]
    if all((microbatch.labels == IGNORE_INDEX).all() for microbatch in step):
        step[0].labels[0, 0] = 1
    recompute = RecomputeConfig(policy=r.choice(["none", "selective", "full"]), offload=r.random() < 0.2)
    return Case(config, draw_values(r, config), (step,), draw_optimizer(r), torch.float64, recompute), mesh


def contradictions(config: ModelConfig, mesh: ParallelConfig, *, ranks: int) -> list[str]:
    """Why this model cannot be trained on this mesh."""
    if found := [*config.errors(), *mesh.errors(ranks), *layout_errors(mesh, layers=config.num_layers)]:
        return found
    if config.moe_layers and config.moe.experts % mesh.ep:
        return ["experts cannot be shared evenly"]
    return cut_errors(config, tp=mesh.tp) if mesh.tp > 1 else []


def draw_model(r: Random) -> ModelConfig:
    """Two to five layers, every field of every part among what it may be."""
    layers = r.randint(2, 5)
    rotary = r.random() < 0.3
    experts = r.choice([4, 8, 16])
    return ModelConfig(
        vocab_size=r.choice([24, 32, 48]),
        hidden_dim=r.choice([12, 16, 24]),
        layers="".join(r.choice("KKM") for _ in range(layers)),
        dense_layers=r.choice([0, 1, r.randint(0, layers)]),
        dense_dim=r.choice([12, 16, 24]),
        activation=r.choice(["situ", "swiglu"]),
        residual_block=r.choice([None, 1, 2, 3, 4, 5, 8, 24]),
        init_std=0.25,
        padding_id=r.choice([None, 3]),
        tie_embeddings=r.random() < 0.4,
        kda=KDAConfig(
            heads=r.choice([1, 2, 4, 6]),
            head_dim=r.choice([4, 6, 8]),
            conv_size=r.choice([1, 2, 4, 6]),
            gate_lower_bound=r.choice([None, -1.0, -5.0, -30.0]),
            full_rank_output_gate=r.random() < 0.5,
        ),
        mla=MLAConfig(
            heads=r.choice([1, 2, 4, 6]),
            q_rank=r.choice([None, 6, 8]),
            kv_rank=r.choice([6, 8]),
            nope_dim=r.choice([4, 8]),
            rope_dim=r.choice([2, 4] if rotary else [2, 3, 4]),
            value_dim=r.choice([4, 8, 16]),
            output_gate=r.random() < 0.6,
            rotary=rotary,
        ),
        moe=MoEConfig(
            experts=experts,
            top_k=r.randint(1, min(4, experts - 1)),
            expert_dim=r.choice([4, 8, 12]),
            latent_dim=r.choice([None, 8, 12]),
            latent_norm=r.random() < 0.7,
            shared_experts=r.choice([0, 1, 2]),
            routed_scaling=r.choice([1.0, 2.4]),
            renormalize=r.random() < 0.8,
            balancing=r.choice(["quantile", "quantile", "sign", "none"]),
            histogram_bins=r.choice([7, 50, 1000]),
        ),
    )


def draw_mesh(r: Random, *, ranks: int) -> ParallelConfig:
    """Any axes whose product is ``ranks``, with any schedule, placement and way of sharing experts."""
    sizes = [1, 2, 4, 8]
    tp, pp, cp = 8, 8, 8
    while ranks % (tp * pp * cp):
        tp, pp, cp = r.choice([1, 1, 2]), r.choice([1, 1, 2, 4]), r.choice([1, 1, 2, 4])
    dp = ranks // (tp * pp * cp)
    vpp = r.choice([1, 2]) if pp > 1 else 1
    return ParallelConfig(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=r.choice([size for size in sizes if (dp * cp) % size == 0]),
        cp=cp,
        dp=dp,
        zero=r.choice([1, 2]),
        schedule=r.choice(["auto", "gpipe", "zero_bubble", "zero_bubble"]),
        placement=r.choice(["loop", "v"]) if vpp == 2 else "loop",
        balance=r.choice(["even", "cost"]),
        bank_cache=r.random() < 0.7,
        experts=ExpertsConfig(
            dispatcher=r.choice(["all_to_all", "balanced"]),
            balance_above=r.choice([1.0, 1.0, 1.3]),
            deduplicate=r.random() < 0.4,
        ),
    )


def draw_microbatch(r: Random, *, length: int, vocab_size: int) -> Microbatch:
    """One row: one document, some, or one a token; all labelled, half, few or none."""
    inner = r.choice([0, length - 1, *(r.randint(1, 6) for _ in range(3))])
    bounds = {0, length, *(r.randint(0, length) for _ in range(inner))}
    if inner == length - 1:
        bounds = set(range(length + 1))
    tokens, labels = (torch.tensor([[r.randrange(vocab_size) for _ in range(length)]]) for _ in range(2))
    labelled = r.choice([1.0, 0.5, 0.08, 0.0])
    labels[0, [place for place in range(length) if r.random() >= labelled]] = IGNORE_INDEX
    return Microbatch(tokens, labels, torch.tensor(sorted(bounds), dtype=torch.int32), np.zeros((1, 3), dtype=np.int64))


def draw_optimizer(r: Random) -> OptimConfig:
    """In fp64; an epsilon that rounding cannot pass, and bounds above and below what they bound."""
    return OptimConfig(
        clip_norm=r.choice([0.0, 0.05, 100.0]),
        ns_dtype="fp64",
        bucket_mb=r.choice([0.001, 0.01, 32.0]),
        eps=1e-3,
        qk_clip=r.choice([0.0, 0.05, 100.0]),
        per_head=r.random() < 0.7,
        output_per_head=r.random() < 0.5,
        nesterov=r.random() < 0.7,
    )


def draw_values(r: Random, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every parameter and buffer in fp64, none at a value of its initialisation that hides a mistake (0, 1)."""
    model = KimiModel(config)
    initialize(model, seed=r.randrange(1000), std=config.init_std)
    set_precision(model, torch.float64)
    generator = torch.Generator().manual_seed(r.randrange(10**6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for buffer in model.buffers():
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
    return dict(model.state_dict())
