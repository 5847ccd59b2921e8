"""ShardSpec and the plan of home experts: pure arithmetic over made-up meshes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ModelConfig
from model.kimi import KimiModel, build_on_meta
from model.params import INITIALISERS, initialize
from parallel.buckets import plan_buckets
from parallel.expert.planner import place_arrivals, plan_home
from parallel.mesh import Axis, Mesh
from parallel.sharding import ShardSpec, materialize, parameter_specs
from tests.bench.live import LiveMemory, bytes_of
from tests.model.tiny import FAMILIES, tiny_config


def mesh(rank: int, ep: int) -> Mesh:
    return Mesh(ep=Axis("ep", None, rank, ep))


def test_slices_join_to_the_whole() -> None:
    spec = ShardSpec(shape=(8, 3), shards=((0, "ep"),))
    whole = torch.arange(24.0).view(8, 3)
    slices = [spec.place(spec.take(whole, mesh(rank, 4)), mesh(rank, 4)) for rank in range(4)]
    assert [part.offsets for part in slices] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert torch.equal(torch.cat([part.local for part in slices]), whole)


ROWS, COLUMNS = ("dense", ((0, "tp"),)), ("dense", ((1, "tp"),))
WHOLE = ("replicas", ())
EXPERT_ROWS, EXPERT_COLUMNS = (("expert_dp", ((0, "ep"), (dim, "tp"))) for dim in (1, 2))


def expected_layouts(config: ModelConfig) -> dict[str, tuple[str, tuple[tuple[int, str], ...]]]:
    """Owners and cuts of every parameter, written out: a new parameter must be thought about here too."""
    kda, mla, moe = config.kda, config.mla, config.moe
    ffn = {"gate.weight": ROWS, "up.weight": ROWS, "down.weight": COLUMNS}
    mixers = {
        "K": {
            **dict.fromkeys(("q.weight", "k.weight", "v.weight", "beta.weight", "gate.up.weight"), ROWS),
            **dict.fromkeys(("q_conv.weight", "k_conv.weight", "v_conv.weight"), ROWS),
            **dict.fromkeys(("decay.up.weight", "decay.A_log", "decay.dt_bias"), ROWS),
            **{"decay.down.weight": WHOLE, "norm.weight": WHOLE, "out.weight": COLUMNS},
            **({} if kda.full_rank_output_gate else {"gate.down.weight": WHOLE}),
        },
        "M": {
            **{"q.up.weight": ROWS, "kv_up.weight": ROWS, "out.weight": COLUMNS},
            **{"kv_down.weight": WHOLE, "kv_norm.weight": WHOLE},
            **({} if mla.q_rank is None else {"q.down.weight": WHOLE, "q.norm.weight": WHOLE}),
            **({"gate.weight": ROWS} if mla.output_gate else {}),
        },
    }
    experts = {
        **{"router.weight": WHOLE, "experts.gate": EXPERT_ROWS, "experts.up": EXPERT_ROWS},
        **{"experts.down": EXPERT_COLUMNS},
        **{f"shared.{name}": layout for name, layout in ffn.items()},
        # Names of a dense feed-forward, and yet whole.
        **({} if moe.latent_dim is None else {"down.weight": WHOLE, "up.weight": WHOLE, "norm.weight": WHOLE}),
    }
    mixes = () if config.residual_block is None else ("query", "norm")
    found = {"embed.weight": ROWS, "head.weight": ROWS, "norm.weight": WHOLE}
    found |= {f"output_mix.{name}": WHOLE for name in mixes}
    for index, mixer in enumerate(config.mixers):
        layer = {f"mixer.{name}": layout for name, layout in mixers[mixer].items()}
        layer |= {f"ffn.{name}": x for name, x in (experts if config.is_moe(index) else ffn).items()}
        layer |= {"mixer_norm.weight": WHOLE, "ffn_norm.weight": WHOLE}
        layer |= {f"{mix}.{name}": WHOLE for mix in ("mixer_mix", "ffn_mix") for name in mixes}
        found |= {f"layers.{index}.{name}": layout for name, layout in layer.items()}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_cut_as_written_out(family: str) -> None:
    config = tiny_config(family)
    layouts = parameter_specs(build_on_meta(config), mesh=Mesh())
    assert {name: (spec.copies, spec.shards) for name, spec in layouts.items()} == expected_layouts(config)


def test_shapes_are_global() -> None:
    place = Mesh(ep=Axis("ep", None, 1, 2), tp=Axis("tp", None, 2, 4))
    model = build_on_meta(tiny_config())
    for name, spec in parameter_specs(model, mesh=place).items():
        local, shape = tuple(model.get_parameter(name).shape), list(model.get_parameter(name).shape)
        for dim, axis in spec.shards:
            shape[dim] *= {"ep": 2, "tp": 4}[axis]
        assert spec.shape == tuple(shape)
        assert spec.local_shape(place) == local


def materialized(config: ModelConfig, mesh: Mesh) -> KimiModel:
    model = build_on_meta(config)
    materialize(model, mesh=mesh, seed=3, std=config.init_std)
    return model


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_draws_its_slices_of_one_ranks_weights(family: str, ep: int, tp: int) -> None:
    config = tiny_config(family)
    whole = KimiModel(config)
    initialize(whole, seed=3, std=config.init_std)
    specs = parameter_specs(whole, mesh=Mesh())
    for rank in range(ep * tp):
        place = Mesh(ep=Axis("ep", None, rank // tp, ep), tp=Axis("tp", None, rank % tp, tp))
        for name, param in materialized(config, place).named_parameters():
            assert torch.equal(param, specs[name].take(whole.get_parameter(name), place)), name


def test_tied_embeddings_are_drawn_once_and_stay_tied() -> None:
    config = tiny_config()
    config.tie_embeddings = True
    model, whole = materialized(config, Mesh()), KimiModel(config)
    initialize(whole, seed=3, std=config.init_std)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, whole.head.weight)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_draws_its_own_experts_alone(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """Of four: neither does it keep the others', nor did they ever exist."""
    config = tiny_config()
    config.moe.experts, config.moe.expert_dim = 512, 20
    filled: list[torch.Size] = []

    def normal(x: torch.Tensor, generator: torch.Generator, std: float) -> None:
        filled.append(x.shape)
        x.normal_(0.0, std, generator=generator)

    monkeypatch.setitem(INITIALISERS, "normal", normal)
    model = build_on_meta(config)
    specs = parameter_specs(model, mesh=Mesh())
    place = Mesh(ep=Axis("ep", None, 1, 4), tp=Axis("tp", None, 1, tp))
    with LiveMemory() as live:
        materialize(model, mesh=place, seed=3, std=config.init_std)
    kept = bytes_of([*model.parameters(), *model.buffers()])
    assert live.now == kept
    assert live.peak <= kept + 4 * max(math.prod(spec.shape[-2:]) for spec in specs.values())
    stacks = [spec.shape for spec in specs.values() if len(spec.shape) == 3]
    # No other parameter has an expert's shape.
    assert sum(shape in {stack[1:] for stack in stacks} for shape in filled) == len(stacks) * 512 // 4
    assert max(len(shape) for shape in filled) == 2


@settings(deadline=None)  # the machine may be busy
@given(seed=st.integers(0, 999), ranks=st.integers(1, 5), home=st.integers(1, 4), most=st.integers(0, 40))
def test_plans_agree_and_arrivals_fill_their_segments(seed: int, ranks: int, home: int, most: int) -> None:
    counts = torch.randint(0, most + 1, (ranks, ranks * home), generator=torch.Generator().manual_seed(seed))
    plans = [plan_home(counts).part(rank) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        assert plan.receive == tuple(plans[source].send[rank] for source in range(ranks))
        slots, ends = place_arrivals(plan.arrivals_RS, alignment=16)
        expected, begin = [], 0
        for segment in range(home):
            rows = int(plan.arrivals_RS[:, segment].sum())
            taken = slots[_segment_of_arrivals(plan.arrivals_RS) == segment]
            # In order of arrival, without gaps, from the beginning of the segment.
            assert taken.tolist() == list(range(begin, begin + rows))
            begin += -(-rows // 16) * 16
            expected.append(begin)
        assert ends.tolist() == expected


def _segment_of_arrivals(arrivals: torch.Tensor) -> torch.Tensor:
    return torch.tensor([s for row in arrivals.tolist() for s, n in enumerate(row) for _ in range(n)])


def test_owners_of_experts_load_all_ranks_that_hold_their_parts() -> None:
    sizes = {"dense0": 64, "dense1": 64, "experts0": 64, "experts1": 64}
    plan = plan_buckets(
        sizes,
        ranks=4,
        bucket_bytes=1,
        cost={"dense0": 1, "dense1": 1, "experts0": 10, "experts1": 9},
        dtypes=dict.fromkeys(sizes, torch.float32),
        copies={"dense0": 4, "dense1": 4, "experts0": 2, "experts1": 2},
    )
    # Ranks 0 and 1 hold the halves of one copy of each expert tensor, 2 and 3 of the other.
    assert [set(plan.owned_by(rank)) for rank in range(4)] == [
        {"experts0"},
        {"experts0"},
        {"experts1", "dense1"},
        {"experts1", "dense0"},
    ]


def test_a_slice_in_two_dims() -> None:
    spec = ShardSpec(shape=(4, 6, 2), shards=((0, "ep"), (1, "tp")))
    whole, joined = torch.arange(48).view(4, 6, 2), torch.zeros(4, 6, 2, dtype=torch.int64)
    for ep in range(2):
        for tp in range(3):
            part = spec.place(spec.take(whole, m := Mesh(ep=Axis("ep", None, ep, 2), tp=Axis("tp", None, tp, 3))), m)
            assert part.offsets == (2 * ep, 2 * tp, 0)
            joined[spec.slices(m)] += part.local
    assert torch.equal(joined, whole)


def test_parts_of_a_parameter_that_is_cut_over_tp_have_owners_side_by_side() -> None:
    sizes = dict.fromkeys(["norm0", "norm1", "heads0", "heads1", "heads2", "experts"], 64)
    copies = {"norm0": 8, "norm1": 8, "heads0": 4, "heads1": 4, "heads2": 4, "experts": 2}
    plan = plan_buckets(
        sizes,
        ranks=8,
        bucket_bytes=1,
        cost=dict.fromkeys(sizes, 1.0),
        dtypes=dict.fromkeys(sizes, torch.float32),
        copies=copies,
    )
    # tp = 2, ep = 2: ranks 0 1, 2 3, ... hold the halves of the heads; 0 1 2 3 and 4 5 6 7 the quarters of the experts.
    owned = [set(plan.owned_by(rank)) for rank in range(8)]
    for name, held in copies.items():
        owners = [rank for rank in range(8) if name in owned[rank]]
        assert len(owners) == 8 // held
        assert owners == list(range(owners[0], owners[0] + len(owners)))
        assert owners[0] % len(owners) == 0
