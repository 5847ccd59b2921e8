"""Next-token cross-entropy in chunks of tokens: the full logits never exist at once.

At a vocabulary of 163,840 and 8,192 tokens the fp32 logits alone are 5 GB. Here a chunk's logits live only
until its loss and its gradient are taken; gradients are computed in the forward pass and scaled in the
backward pass, so the head's product is not computed twice.

Shapes: M tokens (flat), D model, V vocabulary.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.precision import compute_dtype
from model.products import DENSE, Product

IGNORE_INDEX = -100
"""Label of a token that has no next token to predict."""


class Vocabulary(Protocol):
    """Which of the vocabulary's rows a head holds. Whatever the vocabulary, the sums are made in one order."""

    def locate(self, labels_M1: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each label in the head, and whether it is there; the row of one that is not is any of the head's."""
        ...

    def join(self, log_normalizer_M: Tensor, target_M: Tensor) -> tuple[Tensor, Tensor]:
        """Log-normalisers and target logits over all rows, from those over the head's (0 for a target elsewhere)."""
        ...


class WholeVocabulary:
    """`Vocabulary` of a head that holds every row."""

    def locate(self, labels_M1: Tensor) -> tuple[Tensor, Tensor]:
        return labels_M1.clamp(min=0), labels_M1 != IGNORE_INDEX

    def join(self, log_normalizer_M: Tensor, target_M: Tensor) -> tuple[Tensor, Tensor]:
        return log_normalizer_M, target_M


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        labels_M: Tensor,
        product: Product,
        vocabulary: Vocabulary,
        chunk: int,
        with_gradient: bool,
    ) -> Tensor:
        dtype = compute_dtype(hidden_MD.dtype)
        total = torch.zeros((), dtype=dtype, device=hidden_MD.device)
        grad_hidden = torch.empty_like(hidden_MD) if with_gradient else None
        grad_weight = torch.zeros_like(weight_VD, dtype=dtype) if with_gradient else None
        for start in range(0, hidden_MD.shape[0], chunk):
            labels_M1 = labels_M[start : start + chunk].unsqueeze(1)
            unlabelled_M1 = labels_M1 == IGNORE_INDEX
            # Filled and not multiplied: an unlabelled token may hold anything, also NaN, and the head's gradient is a
            # sum over all tokens, in which 0 times NaN would be NaN.
            hidden = hidden_MD[start : start + chunk].masked_fill(unlabelled_M1, 0.0)
            logits = product.value(hidden, weight_VD).to(dtype)
            index, held = vocabulary.locate(labels_M1)
            target = logits.gather(1, index).masked_fill(~held, 0.0).squeeze(1)
            log_normalizer, target = vocabulary.join(logits.logsumexp(dim=1), target)
            total += (log_normalizer - target).masked_fill(unlabelled_M1.squeeze(1), 0.0).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            grad_logits = logits.sub_(log_normalizer.unsqueeze(1)).exp_()
            grad_logits.scatter_add_(1, index, -held.to(dtype))
            grad_logits.masked_fill_(unlabelled_M1, 0.0)
            narrow = grad_logits.to(hidden.dtype)
            grad_hidden[start : start + chunk] = product.input_gradient(narrow, weight_VD)
            grad_weight += product.weight_gradient(narrow, hidden)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        by_hidden = (grad_hidden * grad).to(grad_hidden.dtype)
        return by_hidden, (grad_weight * grad).to(ctx.weight_dtype), None, None, None, None, None


def chunked_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    *,
    product: Product = DENSE,
    chunk: int = 1024,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Sum of the cross-entropies of all labelled tokens, in nats; divide by the step's global count.

    Args:
        hidden: [..., D] normalised last hidden states; what unlabelled tokens hold, NaN too, is read by nobody.
        weight_VD: the head, or the rows of it that ``vocabulary`` knows.
        labels: int64 [...], the next token of each position, `IGNORE_INDEX` where there is none.
        product: of hidden states and the head.
        chunk: tokens whose logits exist at once.
        vocabulary: whose rows the head holds; None: it holds all.

    Returns:
        Scalar fp32 (fp64 for fp64 inputs); 0 where no token is labelled.
    """
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    flat = hidden.reshape(-1, hidden.shape[-1])
    vocabulary = WholeVocabulary() if vocabulary is None else vocabulary
    return _ChunkedCrossEntropy.apply(flat, weight_VD, labels.reshape(-1), product, vocabulary, chunk, with_gradient)
