"""AdamW over a list of tensors, equal to `torch.optim.AdamW`, with one step count for all of them.

    m <- m + (1 - beta1) (g - m);   v <- beta2 v + (1 - beta2) g^2
    W <- (1 - lr weight_decay) W - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

One count is enough because all state exists from step 0 and every step updates every parameter, with a
zero gradient where none came. A weight whose gradient has ceased moves on by beta1 / sqrt(beta2) of the step before
each time, at most 1 (`OptimConfig.errors`), until the first moment is zero.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from optim.groups import Group, OptimConfig
from optim.muon import decay_weights, drop_denormals


@torch.no_grad()
def adamw_step(
    masters: Mapping[str, Tensor],
    *,
    exp_avgs: Mapping[str, Tensor],
    exp_avg_sqs: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    groups: Mapping[str, Group],
    step: int,
    lr: float,
    config: OptimConfig,
) -> None:
    """Update the weights and moments of all ``groups`` in place. Overwrites the gradients.

    Args:
        masters: weights, fp32 or fp64.
        exp_avgs: first moments of the same names, shapes and dtypes.
        exp_avg_sqs: second moments, likewise.
        gradients: likewise.
        groups: AdamW groups by name.
        step: count of this step, from 1.
        lr: learning rate of this step.
        config: betas and eps.
    """
    if not groups:
        return
    beta1, beta2 = config.betas
    weights = [masters[name] for name in groups]
    grads = [gradients[name] for name in groups]
    first = [exp_avgs[name] for name in groups]
    second = [exp_avg_sqs[name] for name in groups]
    decay_weights(masters, groups=groups, lr=lr)
    torch._foreach_lerp_(first, grads, 1 - beta1)
    # Not of the second moment: it divides, and a small number is safer there than none.
    drop_denormals(first)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
    # The gradient is used up; its memory becomes the denominator.
    torch._foreach_copy_(grads, second)
    torch._foreach_sqrt_(grads)
    torch._foreach_div_(grads, math.sqrt(1 - beta2**step))
    torch._foreach_add_(grads, config.eps)
    torch._foreach_addcdiv_(weights, first, grads, value=-lr / (1 - beta1**step))
