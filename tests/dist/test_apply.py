"""What wraps products is in effect on every expert, at home and borrowed, whatever else is installed."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import Tensor

from model.products import Product, wrap_products
from model.widen import widen
from parallel.config import ParallelConfig
from parallel.expert.config import ExpertsConfig
from parallel.mesh import Mesh, make_mesh
from parallel.recompute import RecomputeConfig
from parallel.sharding import TensorSlice
from tests.dist.parity import Case, Outcome, check_parity, merge
from tests.dist.ranks import RankPool
from tests.dist.test_balanced import skewed
from tests.dist.test_expert import make_case
from tests.parallel.test_apply import quantised
from train.parity import build, train

pytestmark = pytest.mark.slow  # steps on several meshes

BALANCED = ExpertsConfig(dispatcher="balanced")
MESHES = {
    "dp2-ep2": ParallelConfig(dp=2, ep=2, experts=BALANCED),
    "dp2-ep2-zero_bubble": ParallelConfig(dp=2, ep=2, schedule="zero_bubble", experts=BALANCED),
    "cp2-ep2": ParallelConfig(cp=2, ep=2, experts=BALANCED),
    "tp2-zero_bubble": ParallelConfig(tp=2, schedule="zero_bubble"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as two:
        yield two


def half(product: Product) -> Product:
    """Another wrapper of numbers: weights count half, forward and backward."""
    return dataclasses.replace(
        product,
        value=lambda x, weight, *ends: product.value(x, weight / 2, *ends),
        input_gradient=lambda grad, weight, *ends: product.input_gradient(grad, weight / 2, *ends),
        weight_gradient=lambda grad, x, *ends: product.weight_gradient(grad, x, *ends) / 2,
    )


def train_wrapped(case: Case, config: ParallelConfig | None) -> Outcome[TensorSlice]:
    """On a rank: a step with products that are widened, quantised and halved."""
    rig = build(case, Mesh() if config is None else make_mesh(config, dist.get_world_size()), config)
    widen(rig.model)
    wrap_products(rig.model, quantised)
    wrap_products(rig.model, half)
    return train(case, rig)


def without_values(outcome: Outcome[Tensor]) -> Outcome[Tensor]:
    """What the wrappers had a part in: not the first values."""
    return dataclasses.replace(outcome, first={})


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MESHES)
def test_a_wrapped_mesh_equals_a_wrapped_rank(pool: RankPool, name: str, policy: str) -> None:
    case = make_case(skewed(), steps=1)
    expected = merge([train_wrapped(case, None)])
    mesh = dataclasses.replace(case, recompute=RecomputeConfig(policy=policy))
    found = merge(pool.run(train_wrapped, mesh, MESHES[name]))
    assert found.faults == ()
    if MESHES[name].ep > 1:
        assert found.traffic["ep return_gradients"].sent > 0, "no expert was borrowed"
    check_parity(without_values(found), without_values(expected), tolerance=1e-9)


def test_the_wrappers_change_numbers() -> None:
    case = make_case(skewed(), steps=1)
    plain, wrapped = merge([train(case, build(case, Mesh()))]), merge([train_wrapped(case, None)])
    assert abs(plain.losses[0] - wrapped.losses[0]) > 1e-3
