"""Pipeline parallel against one rank: every schedule, placement and cut, what is sent, decoding.

Its plain form beside each other axis is in test_meshes.py, checkpoints across meshes in test_checkpoint_grid.py.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.generate import generate
from model.loss import chunked_cross_entropy
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.mesh import Mesh, make_mesh
from parallel.pipeline.boundary import BankRows
from parallel.pipeline.layout import make_layout
from parallel.pipeline.runtime import Pipeline
from parallel.recompute import RecomputeConfig
from tests.dist.parity import Case, Outcome, check_parity, run_alone, run_on_mesh
from tests.dist.ranks import RankError, RankPool
from tests.dist.test_expert import microbatch
from tests.model.tiny import tiny_model, tokens
from train.evaluate import sample_text, validation_loss
from train.proof.parity import LOSS_CHUNK, build, train
from train.step import Stepper, to_device

# Clips gradients, and the attention logits of every head.
OPTIM = OptimConfig(clip_norm=0.05, ns_dtype="fp64", bucket_mb=0.01, qk_clip=0.1)
LENGTH = 24


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(2) as two, RankPool(4) as four:
        yield {2: two, 4: four}


@cache
def make_case(family: str = "k3", microbatches: int = 4, steps: int = 1) -> Case:
    """Packed documents with very different numbers of labels."""
    model = tiny_model(family)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    batches = tuple(tuple(microbatch(8 * s + i, 96) for i in range(microbatches)) for s in range(steps))
    return Case(model.config, values, batches, OPTIM)


@cache
def reference(family: str = "k3", microbatches: int = 4, steps: int = 1) -> Outcome[Tensor]:
    return run_alone(make_case(family, microbatches, steps))


def ranks(mesh: ParallelConfig) -> int:
    return mesh.pp * mesh.tp * mesh.cp * max(1, mesh.dp)


def check(
    pools: dict[int, RankPool], mesh: ParallelConfig, family: str = "k3", microbatches: int = 4, steps: int = 1
) -> Outcome[Tensor]:
    """The case on the mesh equals one rank: loss, norm, gradients, weights, state, loads, biases."""
    outcome = run_on_mesh(pools[ranks(mesh)], make_case(family, microbatches, steps), mesh)
    check_parity(outcome, reference(family, microbatches, steps), tolerance=1e-10 if steps == 1 else 1e-9)
    return outcome


# Tiny models have 5 layers (k2: 3): blocks of two layers, of one sublayer, and none.
PLAIN = {
    "pp2": ParallelConfig(pp=2),
    "pp2-gpipe": ParallelConfig(pp=2, schedule="gpipe"),
    "pp2-zero_bubble": ParallelConfig(pp=2, schedule="zero_bubble"),
    "pp2-uneven": ParallelConfig(pp=2, layout=[4, 1]),
    "pp2-vpp2": ParallelConfig(pp=2, vpp=2),
    "pp2-vpp2-gpipe": ParallelConfig(pp=2, vpp=2, schedule="gpipe"),
    "pp2-vpp2-zero_bubble": ParallelConfig(pp=2, vpp=2, schedule="zero_bubble", layout=[1, 1, 1, 2]),
    "pp2-v": ParallelConfig(pp=2, vpp=2, placement="v"),
    "pp2-v-zero_bubble": ParallelConfig(pp=2, vpp=2, placement="v", schedule="zero_bubble", layout=[1, 2, 1, 1]),
    "pp4": ParallelConfig(pp=4),
    "pp4-zero_bubble": ParallelConfig(pp=4, schedule="zero_bubble", balance="cost"),
}


@pytest.mark.parametrize("family", ["k3", "k3_full"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_pipeline_equals_one_rank(pools: dict[int, RankPool], name: str, family: str) -> None:
    check(pools, PLAIN[name], family)


@pytest.mark.parametrize("mesh", [ParallelConfig(pp=2), ParallelConfig(pp=2, schedule="zero_bubble", layout=[1, 2])])
def test_a_model_without_a_bank(pools: dict[int, RankPool], mesh: ParallelConfig) -> None:
    check(pools, mesh, "k2")


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", ["pp2", "pp2-vpp2", "pp4", "pp2-v-zero_bubble"])
def test_any_number_of_microbatches(pools: dict[int, RankPool], name: str, microbatches: int) -> None:
    check(pools, PLAIN[name], "k3", microbatches)


BESIDE = {
    "pp2-vpp2-dp2-zero2": ParallelConfig(pp=2, vpp=2, dp=2, zero=2),
    "pp2-dp2-zero2-zero_bubble": ParallelConfig(pp=2, dp=2, zero=2, schedule="zero_bubble"),
    "pp2-ep2-zero_bubble": ParallelConfig(pp=2, dp=2, ep=2, schedule="zero_bubble"),
    "pp2-tp2-v-zero_bubble": ParallelConfig(pp=2, vpp=2, tp=2, placement="v", schedule="zero_bubble"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_schedules_and_zero_2_beside_another_axis(pools: dict[int, RankPool], name: str) -> None:
    check(pools, BESIDE[name], steps=2)


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_with_recomputation(pools: dict[int, RankPool], policy: str, schedule: str) -> None:
    case = dataclasses.replace(make_case(), recompute=RecomputeConfig(policy=policy))
    outcome = run_on_mesh(pools[2], case, ParallelConfig(pp=2, vpp=2, schedule=schedule))
    check_parity(outcome, reference())


@pytest.mark.parametrize("family", ["k3", "k3_full"])
@pytest.mark.parametrize("placement", ["loop", "v"])
def test_the_cache_changes_what_is_sent_and_nothing_else(
    pools: dict[int, RankPool], placement: str, family: str
) -> None:
    """Bytes and calls are those of the layout: every hop's slices there, and as many gradients back."""
    sent = {}
    for bank_cache in (True, False):
        mesh = ParallelConfig(pp=2, vpp=2, placement=placement, bank_cache=bank_cache)
        outcome = check(pools, mesh, family)
        layout = make_layout(mesh, make_case(family).config, length=LENGTH)
        slices = [layout.slices(stage) for stage in range(layout.stages)]
        moved = outcome.traffic["pp send"]
        assert moved.calls == 2 * 4 * sum(n > 0 for n in slices)
        assert moved.sent == 2 * 4 * sum(slices) * LENGTH * 32 * 8
        sent[bank_cache] = moved.sent
    assert sent[True] < sent[False]


def sent_by_hop(config: ParallelConfig) -> Counter[tuple[int, int]]:
    case = make_case()
    rig = build(case, make_mesh(config, dist.get_world_size()), config)
    train(case, rig)
    return rig.pipeline.sent


@pytest.mark.parametrize("placement", ["loop", "v"])
@pytest.mark.parametrize("bank_cache", [True, False])
def test_every_hop_carries_the_bytes_of_the_formula(
    pools: dict[int, RankPool], placement: str, bank_cache: bool
) -> None:
    mesh = ParallelConfig(pp=2, vpp=2, placement=placement, bank_cache=bank_cache)
    case = make_case()
    layout = make_layout(mesh, case.config, length=LENGTH)
    steps, microbatches = len(case.steps), len(case.steps[0])
    expected: Counter[tuple[int, int]] = Counter()
    for stage in range(layout.last):
        if layout.is_hop(stage):
            size = layout.slices(stage) * LENGTH * 32 * 8 * steps * microbatches
            expected |= {(stage, stage + 1): size, (stage + 1, stage): size}
    assert sum(pools[2].run(sent_by_hop, mesh), Counter()) == expected


def rows() -> BankRows:
    bank = BankRows("pp rank 1, microbatch 2")
    bank.put(0, torch.zeros(2))
    return bank


def test_rows_that_are_missing_stale_or_twice_are_named() -> None:
    with pytest.raises(AssertionError, match="pp rank 1, microbatch 2: row 1 is missing"):
        rows().get(1)
    with pytest.raises(AssertionError, match="row 0 came twice"):
        rows().put(0, torch.zeros(2))
    bank, value = BankRows("pp rank 1, microbatch 2"), torch.zeros(2)
    bank.put(0, value)
    value.add_(1)
    with pytest.raises(AssertionError, match="row 0 was changed in place, it is stale"):
        bank.get(0)
    bank = rows()
    bank.release()
    with pytest.raises(AssertionError, match="row 0 is missing"):
        bank.get(0)
    with pytest.raises(AssertionError, match="no gradient of row 0 has come"):
        bank.take_gradient(0)
    with pytest.raises(AssertionError, match="a stage that read row 0 has no gradient for it"):
        bank.add_gradient(0, None)


def one_bank_for_all_microbatches(mesh: ParallelConfig) -> None:
    rig = build(make_case(), make_mesh(mesh, 2), mesh)
    bank = BankRows("one for all")
    rig.pipeline._rows = lambda run, action: bank  # type: ignore[method-assign]
    Stepper(rig.pipeline, dp=rig.dp, optimizer=rig.optimizer).step(make_case().steps[0], lr=0.01)


def test_rows_of_another_microbatch_are_never_read() -> None:
    with RankPool(2, grace=2.0) as pool, pytest.raises(RankError, match="one for all: row 0 came twice"):
        pool.run(one_bank_for_all_microbatches, PLAIN["pp2-vpp2"])


def fail_on_rank(mesh: ParallelConfig, rank: int) -> None:
    rig = build(make_case(), make_mesh(mesh, 2), mesh)
    if dist.get_rank() == rank:
        layer = next(layer for layer in rig.model.layers if any(True for _ in layer.parameters()))
        layer.register_forward_hook(lambda *_: torch.zeros(1).view(2))
    Stepper(rig.pipeline, dp=rig.dp, optimizer=rig.optimizer).step(make_case().steps[0], lr=0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_takes_the_other_down(rank: int) -> None:
    with (
        RankPool(2, grace=2.0) as pool,
        pytest.raises(RankError, match=rf"(?s)rank {rank}:.*shape '\[2\]' is invalid"),
    ):
        pool.run(fail_on_rank, PLAIN["pp2-vpp2"], rank)


def evaluated(mesh: ParallelConfig) -> tuple[float, str]:
    rig = build(make_case(), make_mesh(mesh, dist.get_world_size()), mesh)
    before = [buffer.clone() for buffer in rig.model.buffers()]
    loss = validation_loss(rig.pipeline, make_case(microbatches=6).steps[0][rig.mesh.dp.rank :: rig.mesh.dp.size])
    text = sample_text(rig.pipeline, tokens(1, 9)[0].tolist(), decode=str, tokens=6, temperature=0.0, seed=0, stop=None)
    assert all(torch.equal(one, other) for one, other in zip(before, rig.model.buffers(), strict=True))
    return loss, text


@pytest.mark.parametrize(
    "mesh",
    [
        PLAIN["pp2"],
        PLAIN["pp2-vpp2"],
        PLAIN["pp2-v"],
        ParallelConfig(pp=2, vpp=2, dp=2, ep=2),
        ParallelConfig(pp=2, vpp=2, tp=2),
    ],
)
def test_evaluation_and_decoding_equal_one_rank(pools: dict[int, RankPool], mesh: ParallelConfig) -> None:
    model = tiny_model()
    batches = make_case(microbatches=6).steps[0]
    loss = validation_loss(Pipeline(model, mesh=Mesh()), batches)
    prompt = tokens(1, 9)[0]
    text = str([*prompt.tolist(), *generate(model, prompt, tokens=6, temperature=0.0, seed=0)])
    found = pools[ranks(mesh)].run(evaluated, mesh)
    assert len({one[0] for one in found}) == 1
    assert found[0][0] == pytest.approx(loss, rel=1e-12)
    assert {one[1] for one in found} == {text}


@pytest.mark.parametrize("schedule", ["auto", "gpipe"])
def test_one_stage_is_the_plain_model_bit_for_bit(schedule: str) -> None:
    """Against autograd through the whole model, without any of the runtime."""
    case, gradients = make_case(), []
    for plain in (True, False):
        rig = build(case, Mesh(), ParallelConfig(schedule=schedule))
        slices = [to_device(batch, device=torch.device("cpu"), cp=rig.mesh.cp) for batch in case.steps[0]]
        rig.dp.zero_gradients()
        if plain:
            for ids, labels, documents in slices:
                hidden = rig.model.hidden(ids, documents=documents)
                loss = chunked_cross_entropy(hidden, rig.model.head.weight, labels, chunk=LOSS_CHUNK)
                (loss / 41).backward()
        else:
            rig.pipeline.train(slices, labels=41, stats=None, dp=rig.dp)
        gradients.append(rig.dp.owned_gradients())
    plain_gradients, found = gradients
    assert all(torch.equal(found[name], value) for name, value in plain_gradients.items())


def sampled_with_unlike_copies(mesh: ParallelConfig) -> str:
    """Text from ranks whose logits differ, as those of unequal devices do in their last bits."""
    rig = build(make_case(), make_mesh(mesh, dist.get_world_size()), mesh)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for param in rig.model.parameters():
            param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype))
    return sample_text(rig.pipeline, [3, 1, 4], decode=str, tokens=6, temperature=1.0, seed=0, stop=None)


@pytest.mark.parametrize("mesh", [ParallelConfig(dp=2, ep=2), ParallelConfig(pp=2, vpp=2, dp=2)])
def test_all_ranks_sample_the_same_text(pools: dict[int, RankPool], mesh: ParallelConfig) -> None:
    # A rank that alone drew the token that ends a text would leave the others in their next exchange.
    assert len(set(pools[ranks(mesh)].run(sampled_with_unlike_copies, mesh))) == 1
