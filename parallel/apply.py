"""From a plain model to this rank's part of it, in one visible order.

    expert      token exchange over ep
    tensor      heads, inner dims and the vocabulary over tp; sequence-parallel regions around them, the exchange inside
    context     KDA and MLA on slices of the sequence over cp
    recompute   what each layer keeps between forward and backward, of all that came before

Each step swaps implementations at the model's seams. What each parameter's slice is was settled before, by
`parallel.sharding.materialize`; the data-parallel buckets come last, because they move the parameters' storage.
"""

from model.kimi import KimiModel
from parallel.context import install_context
from parallel.expert import use_expert_parallel
from parallel.mesh import ExpertsConfig, Mesh
from parallel.recompute import RecomputeConfig, apply_recompute
from parallel.tensor import install_tensor


def parallelize(model: KimiModel, *, mesh: Mesh, experts: ExpertsConfig, recompute: RecomputeConfig) -> None:
    """Make ``model``, which holds this rank's slices, run on ``mesh``; nothing changes on a mesh of ones."""
    if mesh.ep.size > 1:
        use_expert_parallel(model, axis=mesh.ep, config=experts)
    install_tensor(model, mesh.tp)
    install_context(model, mesh.cp)
    apply_recompute(model, recompute)
