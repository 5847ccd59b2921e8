"""From a plain model to this rank's part of it, in one visible order.

    tensor      heads, inner dims and the vocabulary over tp; sequence-parallel regions around them
    expert      token exchange over ep
    context     KDA and MLA on slices of the sequence over cp

Each step swaps implementations at the model's seams. What each parameter's slice is was settled before, by
`parallel.sharding.materialize`; the data-parallel buckets come last, because they move the parameters' storage.
"""

from model.kimi import KimiModel
from parallel.context import install_context
from parallel.expert.dispatch import use_expert_parallel
from parallel.mesh import Mesh


def parallelize(model: KimiModel, *, mesh: Mesh) -> None:
    """Make ``model``, which holds this rank's slices, run on ``mesh``; nothing changes on a mesh of ones."""
    if mesh.ep.size > 1:
        use_expert_parallel(model, axis=mesh.ep)
    install_context(model, mesh.cp)
