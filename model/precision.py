"""Which dtype holds what.

Under the bf16 policy matrices and embeddings are bf16, while what integrates over time or is compared
finely stays fp32: A_log, dt_bias, the short convolutions, KDA's output norm and the router's bias. Sums,
norms, gates and states are computed in fp32 in either policy. fp64 is for proofs.
"""

import torch
from torch import nn

from model.params import named_roles


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype for sums, norms, gates and states: fp32, or fp64 where the input already is."""
    return torch.promote_types(dtype, torch.float32)


def set_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of ``model`` to ``dtype`` in place; those declared ``keep_fp32`` stay at fp32 or wider.

    Buffers (the routers' biases) take the wider dtype too. Works on the meta device.
    """
    roles = named_roles(model)
    wide = compute_dtype(dtype)
    for name, param in model.named_parameters():
        param.data = param.data.to(wide if roles[name].keep_fp32 else dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(wide)
