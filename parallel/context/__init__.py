"""Context parallel: every sequence is cut into contiguous equal slices of tokens, one per rank of the cp axis.

    layout.py   cuts ids, labels and boundaries; says what each slice knows of the documents that cross its borders
    kda.py      KDA: the state is handed from slice to slice
    mla.py      MLA: every rank attends over the whole sequence with its share of the heads

All other layers treat tokens one by one and notice nothing. Parameters are replicated over cp and each rank's
gradient is that of its own tokens, so gradients are summed over dp x cp.
"""

from torch import nn

from model.kda import KDA
from model.mla import MLA
from parallel.context.kda import ContextKDA
from parallel.context.mla import ContextMLA
from parallel.mesh import Axis


def install_context(model: nn.Module, axis: Axis) -> None:
    """Give every mixer of ``model`` the core that works on slices; nothing changes on an axis of size 1.

    From then on a forward pass without caches must be given the documents of a slice (`layout.slice_tokens`).
    Decoding with caches stays local: each rank that decodes holds the whole text.
    """
    if axis.size == 1:
        return
    for module in model.modules():
        if isinstance(module, KDA):
            module.core = ContextKDA(module.core, axis)
        elif isinstance(module, MLA):
            module.core = ContextMLA(module.core, axis)
