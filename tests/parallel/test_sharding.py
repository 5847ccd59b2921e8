"""ShardSpec and the plan of home experts: pure arithmetic over made-up meshes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from model.kimi import KimiModel
from parallel.data import plan_buckets
from parallel.expert.planner import place_arrivals, plan_home
from parallel.mesh import Axis, Mesh
from parallel.sharding import ShardSpec, parameter_specs
from tests.model.tiny import tiny_config


def mesh(rank: int, ep: int) -> Mesh:
    return Mesh(ep=Axis("ep", None, rank, ep))


def test_slices_join_to_the_whole() -> None:
    spec = ShardSpec(shape=(8, 3), shards=((0, "ep"),), owners="expert_dp")
    whole = torch.arange(24.0).view(8, 3)
    slices = [spec.place(spec.take(whole, mesh(rank, 4)), mesh(rank, 4)) for rank in range(4)]
    assert [part.offsets for part in slices] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert torch.equal(torch.cat([part.local for part in slices]), whole)


def test_experts_are_cut_and_nothing_else_and_shapes_are_global() -> None:
    with torch.device("meta"):
        model = KimiModel(tiny_config())
    for name, spec in parameter_specs(model, mesh=mesh(1, 2)).items():
        local = tuple(model.get_parameter(name).shape)
        expert = ".experts." in name
        assert (spec.owners, spec.shards) == (("expert_dp", ((0, "ep"),)) if expert else ("stage", ()))
        assert spec.shape == ((2 * local[0], *local[1:]) if expert else local)
        assert spec.local_shape(mesh(1, 2)) == local


@given(seed=st.integers(0, 999), ranks=st.integers(1, 5), home=st.integers(1, 4), most=st.integers(0, 40))
def test_plans_agree_and_arrivals_fill_their_segments(seed: int, ranks: int, home: int, most: int) -> None:
    counts = torch.randint(0, most + 1, (ranks, ranks * home), generator=torch.Generator().manual_seed(seed))
    plans = [plan_home(counts, rank=rank) for rank in range(ranks)]
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
        dp=4,
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
