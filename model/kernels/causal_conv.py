"""Depthwise causal convolution with SiLU that sees nothing before its own document.

A sum of shifted products: with four taps that is a few passes over memory, needs no layout change, and its
boundaries are a mask.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.precision import compute_dtype


def causal_conv(x_BTC: Tensor, weight_CW: Tensor, *, position_BT: Tensor, tail: Tensor | None = None) -> Tensor:
    """As `causal_conv_reference`, outputs and gradients.

    Args:
        x_BTC: input; the products and the sum are fp32 (fp64 for fp64 inputs), the result in x's dtype.
        weight_CW: one filter per channel; the last column meets the present token.
        position_BT: each token's position in its own document; taps reaching beyond it are dropped.
        tail: [B, W - 1, C], the inputs just before x when decoding (zeros at a document's beginning).
    """
    dtype = compute_dtype(x_BTC.dtype)
    length, width = x_BTC.shape[1], weight_CW.shape[1]
    weight = weight_CW.to(dtype)
    padded = F.pad(x_BTC, (0, 0, width - 1, 0)) if tail is None else torch.cat([tail, x_BTC], dim=1)
    y = x_BTC.to(dtype) * weight[:, -1]
    for age in range(1, width):
        first = width - 1 - age
        past = padded[:, first : first + length].to(dtype)
        # masked_fill, not a product: a NaN in the document before must not pass.
        past = past.masked_fill((position_BT < age).unsqueeze(-1), 0.0)
        y = y.addcmul(past, weight[:, first])
    return F.silu(y).to(x_BTC.dtype)
