"""From a plain model to this rank's part of it, in one visible order.

    keep        the layers of this rank's pipeline stages
    draw        first weights, of this rank's slices alone
    cast        what is narrow; on a device whose narrow products are slow, products in fp32 with rounded results
    expert      token exchange over ep
    tensor      heads, inner dims and the vocabulary over tp; sequence-parallel regions around them, the exchange inside
    context     KDA and MLA on slices of the sequence over cp
    recompute   what each layer keeps between forward and backward, of all that came before
    defer       weight gradients of products, until the schedule asks for them
    observe     what looks on or chooses for a measurement, such as forced routing

Each step wraps what it finds at a place that the model has for it (a product, a seam, an attribute that is called) and
overwrites no method, so that none undoes another. The data-parallel buckets come last and elsewhere
(`parallel.data`), because they move the parameters' storage.
"""

from collections.abc import Callable, Sequence

import torch

from model.kimi import KimiModel
from model.precision import set_precision
from model.widen import widen
from parallel.context import install_context
from parallel.expert import install_experts
from parallel.expert.config import ExpertsConfig
from parallel.mesh import Mesh
from parallel.pipeline.deferred import DeferredGradients
from parallel.pipeline.layout import PipelineLayout
from parallel.pipeline.stage import keep_part
from parallel.recompute import RecomputeConfig, install_recompute
from parallel.sharding import materialize
from parallel.tensor import install_tensor

Install = Callable[[KimiModel], None]


def parallelize(
    model: KimiModel,
    *,
    mesh: Mesh,
    layout: PipelineLayout | None,
    seed: int,
    dtype: torch.dtype,
    wide: bool,
    experts: ExpertsConfig,
    recompute: RecomputeConfig,
    deferred: DeferredGradients | None,
    observers: Sequence[Install],
) -> None:
    """Make ``model``, whole and on the meta device, this rank's part of it on ``mesh``, in place.

    Args:
        layout: how it is cut into pipeline stages; None: it is whole.
        seed: of the first weights, which are drawn in fp32.
        dtype: of what is narrow.
        wide: whether products are made in fp32 and rounded.
        deferred: takes the weight gradients that are put off; None: none is.
        observers: each is called with the model, in order.
    """
    if layout is not None:
        stages = layout.stages_of(mesh.pp.rank)
        keep_part(model, layout.layers_of(mesh.pp.rank), first=0 in stages, last=layout.last in stages)
    materialize(model, mesh=mesh, seed=seed, std=model.config.init_std)
    set_precision(model, dtype)
    if wide:
        widen(model)
    install_experts(model, axis=mesh.ep, config=experts)
    install_tensor(model, mesh.tp)
    install_context(model, mesh.cp)
    install_recompute(model, recompute)
    if deferred is not None:
        deferred.install(model)
    for observe in observers:
        observe(model)
