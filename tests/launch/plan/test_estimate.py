"""Operations, parameters and activations against what torch counts while the real modules run."""

import gc
import math
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import launch.plan.memory
import model.moe
import optim.distributed
from launch.plan.activations import index_bytes, layer_bytes, output_bytes
from launch.plan.memory import memory_of, rank_memory
from launch.plan.step import StepPlan, held_by
from model.config import ModelConfig, MoEConfig
from model.flops import KDA_CHUNK, forward_flops, training_flops
from model.kda import KDA
from model.kernels.kda_plan import CHUNK
from model.kimi import KimiModel
from model.seams import Received
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.recompute import RecomputeConfig
from tests.bench.live import LiveMemory, bytes_of
from tests.model.tiny import FAMILIES, tiny_config, tiny_model, tokens
from train.build import build_model, build_optimizer


def dense(config: ModelConfig) -> ModelConfig:
    config.dense_layers = config.num_layers
    return config


def counted(model: KimiModel, length: int) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(1, length))
    return counter.get_total_flops()


def test_mla_feed_forward_and_head_equal_the_count_of_the_run() -> None:
    config, length = dense(tiny_config("k2")), 64
    mla = config.mla
    # torch does not count its fused CPU attention: token i meets i + 1 keys, N + P and V wide.
    pairs = sum(i + 1 for i in range(length))
    attention = config.num_layers * pairs * 2 * mla.heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    found = counted(tiny_model(config), length) + attention
    assert found == pytest.approx(length * forward_flops(config, length=length).total, rel=1e-12)


def test_kda_projections_equal_the_count_of_the_run() -> None:
    config = dense(tiny_config("k3"))
    config.layers = "K"
    kda = config.kda
    width, dim, k = kda.heads * kda.head_dim, config.hidden_dim, kda.head_dim
    module = KDA(dim, kda, norm_eps=1e-5)
    projections = 2 * (5 * dim * width + dim * k + k * width + dim * kda.heads)
    weights = sum(
        p.numel() for n, p in module.named_parameters() if n.endswith(".weight") and p.dim() == 2 and "conv" not in n
    )
    assert projections == 2 * weights
    recurrence = 2 * kda.heads * (4 * KDA_CHUNK * k + 3 * k * k)
    assert forward_flops(config, length=1).kda == projections + 6 * width * kda.conv_size + recurrence


def test_only_active_experts_count() -> None:
    base = tiny_config("k3")
    more = tiny_config("k3")
    more.moe = MoEConfig(experts=64, top_k=2, expert_dim=16, latent_dim=16, shared_experts=1)
    one, other = forward_flops(base, length=8), forward_flops(more, length=8)
    assert one.routed_experts == other.routed_experts
    assert other.router == 8 * one.router


def test_released_model_costs_six_operations_per_active_weight_and_little_more() -> None:
    config = ModelConfig()
    _, active = config.count_parameters()
    ratio = training_flops(config, length=1) / (6 * active)
    assert 1.0 < ratio < 1.03


def test_residual_sources_grow_with_the_bank() -> None:
    config = ModelConfig()
    plain = ModelConfig(residual_block=None)
    assert forward_flops(plain, length=1).residual == 0
    # Each of 186 sublayers and the output reads the prefix and, on average, about half of 8 rows.
    sources = forward_flops(config, length=1).residual / (4 * config.hidden_dim)
    assert 187 * 2 < sources < 187 * 9


def hidden_and_rows(model_: KimiModel, length: int) -> tuple[torch.Tensor, list[int]]:
    """Hidden states of random tokens, and the rows that the experts of each layer computed, padding included."""
    rows: list[int] = []
    ffn = model.moe.expert_ffn

    def counting(received: Received, *args: object, **options: object) -> torch.Tensor:
        rows.append(received.rows_RL.shape[0])
        return ffn(received, *args, **options)

    with patch.object(model.moe, "expert_ffn", counting):
        return model_.hidden(tokens(1, length)), rows


def estimate(plan: StepPlan, rows: list[int]) -> float:
    """Bytes of all layers and the output, but for KDA's indices."""
    of_layer = iter(rows)
    layers = range(plan.model.num_layers)
    kept = sum(layer_bytes(plan, layer, rows=next(of_layer) if plan.model.is_moe(layer) else 0) for layer in layers)
    return kept + output_bytes(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_what_autograd_saves_to_the_byte(family: str, dtype: torch.dtype) -> None:
    config, length = tiny_config(family), 64
    net = tiny_model(config, dtype=dtype)
    weights = {param.untyped_storage().data_ptr() for param in net.parameters()}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        hidden, rows = hidden_and_rows(net, length)
    # Nobody has saved the hidden states yet, and the embedding keeps the ids.
    expected = estimate(StepPlan(model=config, length=length, dtype=dtype), rows)
    assert sum(saved.values()) == expected - bytes_of([hidden]) + 8 * length


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_between_forward_and_backward_by_policy(family: str, policy: str) -> None:
    config, length = tiny_config(family), 128
    recompute = RecomputeConfig(policy=policy)
    net = build_model(
        config, seed=0, dtype=torch.bfloat16, device=torch.device("cpu"), mesh=Mesh(), recompute=recompute
    )
    hidden_and_rows(net, length)  # for the kernel's constants, which stay
    with LiveMemory([*net.parameters(), *net.buffers()]) as live:
        # What is held on to here is a part of what is counted.
        kept = hidden_and_rows(net, length)
        gc.collect()
    plan = StepPlan(model=config, length=length, recompute=policy)
    expected = estimate(plan, kept[1]) + index_bytes(plan, range(config.num_layers))
    if "K" in config.mixers:
        expected += 4 * CHUNK**2  # the identity, which is kept from call to call
    # Documents' positions and KDA's offsets are not in the formulas: under 32 bytes a token.
    assert 0 <= live.now - expected < 32 * length


@pytest.mark.parametrize(
    "config",
    [ParallelConfig(dp=4), ParallelConfig(dp=4, ep=4), ParallelConfig(pp=2, vpp=2, tp=2, dp=1), ParallelConfig(cp=4)],
    ids=str,
)
def test_ranks_hold_and_own_the_whole_model(config: ParallelConfig) -> None:
    plan = StepPlan(model=tiny_config(), parallel=config, world_size=4, length=64)
    ranks = [held_by(plan, rank=rank) for rank in range(4)]
    owned = sum(math.prod(held.shapes[name]) for held in ranks for name in held.owned)
    assert owned == plan.model.count_parameters()[0]
    memory = [rank_memory(plan, rank=rank) for rank in range(4)]
    # bf16 weights have masters, but for those that are fp32 themselves.
    wide = sum(
        math.prod(held.shapes[name]) for held in ranks for name in held.owned if held.dtypes[name] == torch.float32
    )
    assert sum(part.masters for part in memory) == 4 * (owned - wide)


def test_zero_2_keeps_the_gradients_of_owned_buckets() -> None:
    plans = [
        StepPlan(
            model=tiny_config(),
            parallel=ParallelConfig(dp=4, zero=zero),
            world_size=4,
            length=64,
            optim=OptimConfig(bucket_mb=2**-6),
        )
        for zero in (1, 2)
    ]
    one, two = ([rank_memory(plan, rank=rank) for rank in range(4)] for plan in plans)
    assert sum(part.gradients for part in two) == one[0].gradients
    assert all(part.gradients == one[0].gradients for part in one)
    assert all(0 < part.transient < one[0].gradients for part in two)


def test_kimi_k3_on_a_large_mesh() -> None:
    """Sixteen stages of two, experts over 64 ranks: all stages together hold what the formula counts."""
    parallel = ParallelConfig(pp=16, vpp=2, dp=64, ep=64)
    plan = StepPlan(model=ModelConfig(), parallel=parallel, world_size=1024, length=4096, microbatches=32)
    total, _ = plan.model.count_parameters()
    stages = [held_by(plan, rank=64 * stage) for stage in range(16)]
    experts = sum(math.prod(shape) for held in stages for name, shape in held.shapes.items() if ".experts." in name)
    assert sum(held.parameters for held in stages) - experts + 64 * experts == total


def test_rounds_bound_the_exchange_of_kimi_k3() -> None:
    """Over eight tensor ranks the largest matrix alone exceeds a bucket, and each rank makes 10 GiB of them whole."""
    plan = StepPlan(
        model=ModelConfig(),
        parallel=ParallelConfig(pp=16, tp=8, dp=8, ep=8),
        world_size=1024,
        length=4096,
        device="cuda",
    )
    held, memory = held_by(plan, rank=512), rank_memory(plan, rank=512)
    whole, largest = [], 0
    for portions in held.rounds(plan, owned=held.owned):
        sizes = [4 * math.prod(held.groups[portion.name].blocks[0][1:]) for portion in portions]
        whole.append(sum(portion.counts[0] * size for portion, size in zip(portions, sizes)))
        largest = max(largest, *sizes)
    assert sum(whole) > 10 * 2**30
    assert max(whole) == largest > plan.optim.bucket_bytes
    assert 2 * largest < memory.exchange < 5 * largest
    # Activations are gone when it happens, and they are more.
    assert memory.peak == memory.static + memory.transient + memory.activations + memory.working


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("limit", [2**13, 2**16], ids=["several stacks", "one a shape"])
def test_stacks_of_whole_matrices_are_what_a_step_takes(
    limit: int, ns_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (optim.distributed, launch.plan.memory):
        monkeypatch.setattr(module, "batch_elements", lambda device: limit)
    config = OptimConfig(ns_dtype=ns_dtype)
    net = tiny_model("k3", dtype=torch.bfloat16)
    dp, optimizer = build_optimizer(net, config, mesh=Mesh())
    gradients = dp.owned_gradients()
    for gradient in gradients.values():
        gradient.fill_(0.5)
    known = [*net.parameters(), *optimizer.state_dict().values(), *gradients.values()]
    with LiveMemory(known) as live:
        optimizer.step(gradients, lr=0.01)
    plan = StepPlan(model=net.config, length=8, optim=config)
    memory = rank_memory(plan, rank=0)
    assert memory.update == memory.stack > 0
    # Norms and powers of two, a few numbers a matrix, are not counted.
    assert 0 <= live.peak - memory.stack < 0.05 * memory.stack + 2**12


def test_stacks_fill_an_accelerator() -> None:
    plan = StepPlan(model=ModelConfig(layers="KKKM"), length=8, device="cuda")
    memory = memory_of(plan, held_by(plan, rank=0))
    largest = max(rows * columns for group in plan.stages[0].groups.values() for _, rows, columns in group.blocks)
    # 2^26 elements, or one larger matrix: a copy of several pieces, and what is scaled before and after its cast.
    assert 2**26 * 4 < memory.stack <= max(2**26, largest) * (4 + 4 + 2)
    assert memory.peak == memory.static + max(memory.transient + memory.activations + memory.working, memory.stack)
