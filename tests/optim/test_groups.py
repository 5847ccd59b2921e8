"""Every parameter is in exactly one group, and every element of a matrix in exactly one block."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import nn

from model.params import ParamRole, declare
from optim.groups import OptimConfig, describe_groups, make_group
from optim.muon import plan_batches
from parallel.sharding import ShardSpec

MATRIX = ParamRole(kind="matrix")
PER_HEAD = ParamRole(kind="matrix", heads=4)
KEY_VALUE = ParamRole(kind="matrix", heads=4, sections=(3, 2))
OUTPUT = ParamRole(kind="matrix", heads=4, by_columns=True)
VECTOR = ParamRole(kind="vector", decay=False)

roles = st.one_of(
    st.builds(lambda h, r, c: (ParamRole(kind="matrix", heads=h), (h * r, c)), *[st.integers(1, 5)] * 3),
    st.builds(
        lambda h, r, c: (ParamRole(kind="matrix", heads=h, by_columns=True), (r, h * c)),
        *[st.integers(1, 5)] * 3,
    ),
    st.builds(
        lambda h, a, b, c: (ParamRole(kind="matrix", heads=h, sections=(a, b)), (h * (a + b), c)),
        *[st.integers(1, 5)] * 4,
    ),
    st.builds(lambda e, r, c: (MATRIX, (e, r, c)), *[st.integers(1, 5)] * 3),
)


@given(
    case=st.lists(roles, min_size=1, max_size=4),
    per_head=st.booleans(),
    output_per_head=st.booleans(),
    limit=st.integers(1, 60),
)
def test_blocks_cover_every_element_once(
    case: list[tuple[ParamRole, tuple[int, ...]]], per_head: bool, output_per_head: bool, limit: int
) -> None:
    config = OptimConfig(per_head=per_head, output_per_head=output_per_head)
    tensors = {str(i): torch.zeros(shape) for i, (_, shape) in enumerate(case)}
    groups = {
        str(i): make_group(str(i), param=tensors[str(i)], role=role, config=config) for i, (role, _) in enumerate(case)
    }
    matrices = 0
    for batch in plan_batches(list(groups.values()), max_elements=limit):
        count = 0
        for piece in batch.pieces:
            blocks = groups[piece.name].role.blocks(tensors[piece.name])[piece.part][piece.start : piece.stop]
            assert blocks.shape[1:] == (batch.rows, batch.columns)
            assert len(blocks) == piece.stop - piece.start > 0
            blocks += 1
            count += len(blocks)
        assert count == 1 or count * batch.rows * batch.columns <= limit
        matrices += count
    assert all(torch.equal(x, torch.ones_like(x)) for x in tensors.values())
    assert matrices == sum(count for group in groups.values() for count, _, _ in group.blocks)


def test_heads_follow_the_config() -> None:
    query, output = torch.zeros(8, 6), torch.zeros(6, 8)

    def blocks(role: ParamRole, x: torch.Tensor, **options: bool) -> tuple[tuple[int, int, int], ...]:
        return make_group("x", param=x, role=role, config=OptimConfig(**options)).blocks

    assert blocks(PER_HEAD, query) == ((4, 2, 6),)
    assert blocks(PER_HEAD, query, per_head=False) == ((1, 8, 6),)
    assert blocks(OUTPUT, output) == ((1, 6, 8),)
    assert blocks(OUTPUT, output, output_per_head=True) == ((4, 6, 2),)
    key_value = torch.zeros(20, 7)
    assert blocks(KEY_VALUE, key_value) == ((4, 3, 7), (4, 2, 7))
    assert blocks(KEY_VALUE, key_value, per_head=False) == ((1, 20, 7),)


class Parts(nn.Module):
    """One parameter of every sort a model has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(32, 6))
        self.head = nn.Parameter(torch.empty(32, 6))
        self.query = nn.Parameter(torch.empty(8, 6))
        self.key_value = nn.Parameter(torch.empty(20, 6))
        self.output = nn.Parameter(torch.empty(6, 8))
        self.router = nn.Parameter(torch.empty(5, 6))
        self.experts = nn.Parameter(torch.empty(5, 4, 6))
        self.conv = nn.Parameter(torch.empty(8, 4))
        self.norm = nn.Parameter(torch.empty(6))
        self.a_log = nn.Parameter(torch.empty(4))
        self.frozen = nn.Parameter(torch.empty(4, 4), requires_grad=False)
        embedding = ParamRole(kind="embedding")
        declare(
            self,
            embedding=embedding,
            head=embedding,
            query=PER_HEAD,
            key_value=KEY_VALUE,
            output=OUTPUT,
            router=MATRIX,
            experts=MATRIX,
            conv=VECTOR,
            norm=VECTOR,
            a_log=VECTOR,
            frozen=MATRIX,
        )


def test_dump() -> None:
    rows = describe_groups(Parts().to("meta"), config=OptimConfig(weight_decay=0.1))
    assert [(r.name, r.shape, r.optimizer, r.blocks, r.weight_decay) for r in rows] == [
        ("embedding", (32, 6), "adamw", (), 0.1),
        ("head", (32, 6), "adamw", (), 0.1),
        ("query", (8, 6), "muon", ((4, 2, 6),), 0.1),
        ("key_value", (20, 6), "muon", ((4, 3, 6), (4, 2, 6)), 0.1),
        ("output", (6, 8), "muon", ((1, 6, 8),), 0.1),
        ("router", (5, 6), "muon", ((1, 5, 6),), 0.1),
        ("experts", (5, 4, 6), "muon", ((5, 4, 6),), 0.1),
        ("conv", (8, 4), "adamw", (), 0.0),
        ("norm", (6,), "adamw", (), 0.0),
        ("a_log", (4,), "adamw", (), 0.0),
    ]


def test_a_parameter_without_a_role_is_an_error() -> None:
    model = Parts()
    model.extra = nn.Parameter(torch.empty(2, 2))
    with pytest.raises(ValueError, match="extra: no role"):
        describe_groups(model, config=OptimConfig())


def test_a_matrix_needs_rows_and_columns() -> None:
    with pytest.raises(ValueError, match=r"bias: role matrix needs 2 dims.*\[4\]"):
        make_group("bias", param=torch.zeros(4), role=MATRIX, config=OptimConfig())


def test_config_survives_omegaconf() -> None:
    config = OmegaConf.merge(OmegaConf.structured(OptimConfig), {"betas": [0.8, 0.9], "per_head": False})
    loaded = OmegaConf.to_object(config)
    assert isinstance(loaded, OptimConfig)
    assert (tuple(loaded.betas), loaded.per_head, loaded.errors()) == ((0.8, 0.9), False, [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", float("nan")),
        ("weight_decay", -0.1),
        ("momentum", 1.0),
        ("ns_steps", 0),
        ("ns_dtype", "fp16"),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("clip_norm", -1.0),
        ("qk_clip", -1.0),
        ("bucket_mb", 0.0),
        ("bucket_mb", 2.0**20 + 1),
        ("ns_steps", 100),
        ("momentum", -0.1),
        ("betas", (-0.1, 0.9)),
        ("betas", (0.9,)),
        ("betas", (0.95, 0.9)),
    ],
)
def test_config_errors(field: str, value: object) -> None:
    (error,) = OptimConfig(**{field: value}).errors()
    assert error.startswith(f"optim.{field}=")


def test_all_config_errors_at_once() -> None:
    assert len(OptimConfig(lr=-1.0, ns_steps=0, ns_dtype="x").errors()) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_decay", 0.0),
        ("momentum", 0.0),
        ("clip_norm", 0.0),
        ("qk_clip", 0.0),
        ("qk_clip", 0.5),
        ("ns_steps", 1),
        ("ns_steps", 99),
        ("betas", (0.0, 0.0)),
        ("betas", (0.5, 0.25)),
        ("bucket_mb", 2.0**-20),
        ("bucket_mb", 2.0**20),
    ],
)
def test_values_at_their_limits_are_fine(field: str, value: object) -> None:
    assert OptimConfig(**{field: value}).errors() == []


@pytest.mark.parametrize(("mb", "size"), [(1.0, 1048576), (0.5, 524288), (2.0**-20, 1)])
def test_a_bucket_is_counted_in_mebibytes(mb: float, size: int) -> None:
    assert OptimConfig(bucket_mb=mb).bucket_bytes == size


def test_work_is_that_of_the_matrices_and_of_the_elements() -> None:
    """r <= c makes 5 (4 r^2 c + 2 r^3) a matrix, and an element 200."""
    config = OptimConfig()
    assert make_group("v", param=torch.zeros(7), role=VECTOR, config=config).cost == 200 * 7
    one = 5 * (4 * 9 * 4 + 2 * 27)
    for shape in ((3, 4), (4, 3)):
        assert make_group("m", param=torch.zeros(shape), role=MATRIX, config=config).cost == 200 * 12 + one
    assert make_group("e", param=torch.zeros(5, 3, 4), role=MATRIX, config=config).cost == 200 * 60 + 5 * one
    heads = make_group("q", param=torch.zeros(12, 4), role=PER_HEAD, config=config)
    assert heads.cost == 200 * 48 + 4 * one
    sections = make_group("kv", param=torch.zeros(20, 4), role=KEY_VALUE, config=config)
    assert sections.cost == 200 * 80 + 4 * one + 4 * 5 * (4 * 4 * 4 + 2 * 8)


@pytest.mark.parametrize(("dim", "held"), [(0, (3, 8)), (1, (6, 4))], ids=["rows", "columns"])
def test_a_cut_matrix_is_whole_in_its_block_and_half_in_its_work(dim: int, held: tuple[int, int]) -> None:
    spec = ShardSpec(shape=(6, 8), shards=((dim, "tp"),))
    group = make_group("m", param=torch.zeros(held), role=MATRIX, config=OptimConfig(), spec=spec)
    assert (group.blocks, group.cut, group.shape) == (((1, 6, 8),), (dim, 2), held)
    assert group.cost == 200 * 24 + 5 * (4 * 36 * 8 + 2 * 216) / 2
    (part,) = group.matrices(torch.arange(24.0).view(held))
    assert part.shape == (1, *held)


def test_a_cut_between_heads_leaves_whole_matrices() -> None:
    spec = ShardSpec(shape=(8, 6), shards=((0, "tp"),))
    group = make_group("q", param=torch.zeros(4, 6), role=PER_HEAD, config=OptimConfig(), spec=spec)
    assert (group.blocks, group.cut, group.role.heads) == (((2, 2, 6),), None, 2)


@pytest.mark.parametrize("shards", [(), ((0, "tp"),), ((0, "ep"),)], ids=["none", "tp of one", "ep"])
def test_what_tp_does_not_cut_is_not_cut(shards: tuple[tuple[int, str], ...]) -> None:
    shape = (8, 6) if shards == ((0, "ep"),) else (4, 6)
    spec = ShardSpec(shape=shape, shards=shards)
    group = make_group("m", param=torch.zeros(4, 6), role=MATRIX, config=OptimConfig(), spec=spec)
    assert (group.blocks, group.cut) == (((1, 4, 6),), None)


def test_a_cut_that_leaves_each_rank_one_of_two_heads_is_no_cut() -> None:
    spec = ShardSpec(shape=(8, 6), shards=((0, "tp"),))
    role = ParamRole(kind="matrix", heads=2)
    group = make_group("q", param=torch.zeros(4, 6), role=role, config=OptimConfig(), spec=spec)
    assert (group.blocks, group.cut, group.role.heads) == (((1, 4, 6),), None, 1)
