"""Newton-Schulz orthogonalisation of a batch of matrices.

Five steps of an odd quintic push every singular value towards one: ``U S V^T -> U S' V^T`` with S' roughly
in [0.7, 1.2]. The result does not depend on the scale of the input, however small, so there is no epsilon:
each matrix is first multiplied by a power of two (exact) that brings its largest element into [1/2, 1),
and only then divided by its norm. A zero matrix gives exactly zero.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024): steepest slope at zero."""


def default_dtype(x: Tensor) -> torch.dtype:
    """bf16 on accelerators; on the CPU fp32, or fp64 where ``x`` is."""
    if x.device.type != "cpu":
        return torch.bfloat16
    return torch.promote_types(x.dtype, torch.float32)


@torch.no_grad()
def orthogonalize(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Approximate polar factor ``U V^T`` of every matrix of a batch, each on its own.

    Args:
        x: [n, r, c], finite.
        steps: iterations.
        coefficients: (a, b, c) of ``x <- a x + b (x x^T) x + c (x x^T)^2 x``.
        dtype: computation and result; None takes `default_dtype`.

    Returns:
        [n, r, c] in ``dtype``.
    """
    dtype = default_dtype(x) if dtype is None else dtype
    a, b, c = coefficients
    _, exponent = torch.frexp(torch.linalg.vector_norm(x, ord=torch.inf, dim=(1, 2), keepdim=True))
    # The clamp keeps the factor finite below the smallest normal number, where it only loses range.
    factor = torch.exp2(-exponent.to(x.dtype)).clamp(max=torch.finfo(x.dtype).max)
    y = (x * factor).to(dtype)
    norm = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
    y.div_(norm.clamp(min=torch.finfo(dtype).tiny))
    tall = y.shape[1] > y.shape[2]
    if tall:
        # The Gram matrix over the smaller side costs least.
        y = y.mT
    for _ in range(steps):
        gram = torch.bmm(y, y.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return y.mT if tall else y
