"""The whole model: every parameter in one group, one Newton-Schulz for each matrix that the config implies."""

import pytest
import torch
from torch import Tensor

import optim.muon
from model.config import ModelConfig
from model.params import named_roles
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig, describe_groups
from optim.newton_schulz import orthogonalize
from parallel.data import DataParallel
from parallel.mesh import Axis
from tests.model.tiny import FAMILIES, tiny_config, tiny_model

NEVER_MUON = ("embed.", "head.", "norm", "query", "A_log", "dt_bias", "conv", "beta.")


def logical_matrices(config: ModelConfig) -> int:
    """Matrices that are orthogonalised alone, counted from the config (the split of docs/optimizers.md)."""
    kda, mla, moe = config.kda.heads, config.mla.heads, config.moe
    total = 0
    for layer, mixer in enumerate(config.mixers):
        if mixer == "K":
            q_k_v_gate_decay = 5 * kda
            down = 1 if config.kda.full_rank_output_gate else 2
            total += q_k_v_gate_decay + down + 1
        else:
            query = mla + (config.mla.q_rank is not None)
            key_value = 1 + 2 * mla
            gate = mla * config.mla.output_gate
            total += query + key_value + gate + 1
        if config.is_moe(layer):
            router, shared, latent = 1, 3 * (moe.shared_experts > 0), 2 * (moe.latent_dim is not None)
            total += router + shared + latent + 3 * moe.experts
        else:
            total += 3
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_one_newton_schulz_for_each_matrix(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    params = dict(model.named_parameters())
    count = 0

    def counting(x: Tensor, *, steps: int, dtype: torch.dtype | None) -> Tensor:
        nonlocal count
        count += len(x)
        return orthogonalize(x, steps=steps, dtype=dtype)

    monkeypatch.setattr(optim.muon, "orthogonalize", counting)
    dp = DataParallel(params, axis=Axis())
    optimizer = ShardedOptimizer(params, roles=named_roles(model), config=OptimConfig(), dp=dp)
    before = {name: param.detach().clone() for name, param in params.items()}
    generator = torch.Generator().manual_seed(0)
    for gradient in dp.owned_gradients().values():
        gradient.normal_(generator=generator)
    optimizer.step(dp.owned_gradients(), lr=0.01)
    assert count == logical_matrices(tiny_config(family))
    assert all((param != before[name]).all() for name, param in params.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_the_model(family: str) -> None:
    model = tiny_model(family)
    rows = describe_groups(model, config=OptimConfig())
    assert [row.name for row in rows] == [name for name, _ in model.named_parameters()]
    for row in rows:
        never = any(part in row.name for part in NEVER_MUON)
        assert (row.optimizer == "adamw") == never, row.name
        vector_without_decay = never and not row.name.startswith(("embed.", "head.")) and "beta." not in row.name
        assert (row.weight_decay == 0) == vector_without_decay, row.name
