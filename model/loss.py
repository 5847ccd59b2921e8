"""Next-token cross-entropy in chunks of tokens: the full logits never exist at once.

At a vocabulary of 163,840 and 8,192 tokens the fp32 logits alone are 5 GB. Here a chunk's logits live only
until its loss and its gradient are taken; gradients are computed in the forward pass and scaled in the
backward pass, so the head's product is not computed twice.

Shapes: M tokens (flat), D model, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.precision import compute_dtype
from model.products import DENSE, Product

IGNORE_INDEX = -100
"""Label of a token that has no next token to predict."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        labels_M: Tensor,
        product: Product,
        chunk: int,
        with_gradient: bool,
    ) -> Tensor:
        dtype = compute_dtype(hidden_MD.dtype)
        total = torch.zeros((), dtype=dtype, device=hidden_MD.device)
        grad_hidden = torch.empty_like(hidden_MD) if with_gradient else None
        grad_weight = torch.zeros_like(weight_VD, dtype=dtype) if with_gradient else None
        for start in range(0, hidden_MD.shape[0], chunk):
            hidden, labels = hidden_MD[start : start + chunk], labels_M[start : start + chunk]
            logits = product.value(hidden, weight_VD).to(dtype)
            log_normalizer = logits.logsumexp(dim=1)
            valid = labels != IGNORE_INDEX
            index = labels.clamp(min=0).unsqueeze(1)
            losses = log_normalizer - logits.gather(1, index).squeeze(1)
            # where, not a product: an unlabelled token may hold anything, NaN too.
            total += torch.where(valid, losses, 0.0).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            grad_logits = logits.sub_(log_normalizer.unsqueeze(1)).exp_()
            grad_logits.scatter_add_(1, index, torch.full_like(losses, -1.0).unsqueeze(1))
            grad_logits.masked_fill_(~valid.unsqueeze(1), 0.0)
            narrow = grad_logits.to(hidden.dtype)
            grad_hidden[start : start + chunk] = product.input_gradient(narrow, weight_VD)
            grad_weight += product.weight_gradient(narrow, hidden)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            (grad_hidden * grad).to(grad_hidden.dtype),
            (grad_weight * grad).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )


def chunked_cross_entropy(
    hidden: Tensor, weight_VD: Tensor, labels: Tensor, *, product: Product = DENSE, chunk: int = 1024
) -> Tensor:
    """Sum of the cross-entropies of all labelled tokens, in nats; divide by the step's global count.

    Args:
        hidden: [..., D] normalised last hidden states.
        weight_VD: the head.
        labels: int64 [...], the next token of each position, `IGNORE_INDEX` where there is none.
        product: of hidden states and the head.
        chunk: tokens whose logits exist at once.

    Returns:
        Scalar fp32 (fp64 for fp64 inputs); 0 where no token is labelled.
    """
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _ChunkedCrossEntropy.apply(flat, weight_VD, labels.reshape(-1), product, chunk, with_gradient)
