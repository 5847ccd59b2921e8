"""Depthwise causal convolution with SiLU, the law: one token and one tap at a time."""

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv_reference(x_BTC: Tensor, weight_CW: Tensor, *, position_BT: Tensor) -> Tensor:
    """``silu(sum_a weight[:, W - 1 - a] * x[t - a])`` over the ages a that lie inside token t's document.

    Args:
        x_BTC: input.
        weight_CW: one filter per channel, newest tap last.
        position_BT: each token's position in its own document.
    """
    width = weight_CW.shape[1]
    rows = []
    for x_TC, position_T in zip(x_BTC, position_BT.tolist()):
        for t, position in enumerate(position_T):
            taps = [weight_CW[:, width - 1 - age] * x_TC[t - age] for age in range(min(position + 1, width))]
            rows.append(F.silu(torch.stack(taps).sum(dim=0)))
    return torch.stack(rows).view_as(x_BTC)
