"""bf16 on devices whose bf16 products are slow: multiply in fp32 and round, which gives the same sums.

A CPU without units for bf16 falls back to a naive product at a hundredth of fp32's rate (AVX2), or to one that emulates
them at a third (AVX-512 without its bf16 part). Storage, traffic and everything that is no product stay bf16. What is
chosen is a function of the machine and not of a measurement, so that a resumed run rounds as it did before.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from model.mla import MLA
from model.precision import compute_dtype
from model.products import Product, wrap_products
from model.seams import AttentionKernel


def has_bf16_units(device: torch.device) -> bool:
    """Whether products of bf16 are faster than those of fp32 on ``device``: true of accelerators and of some CPUs."""
    if device.type != "cpu":
        return True
    # oneDNN makes the products; without it torch has a naive loop.
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    features = torch.cpu.get_capabilities()
    # On x86 it takes bf16 also where it must emulate it.
    return features.get("architecture") != "x86_64" or features["avx512_bf16"] or features["amx_bf16"]


def wants_fp32_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model of ``dtype`` on ``device`` should be given to `widen`."""
    return compute_dtype(dtype) != dtype and not has_bf16_units(device)


def in_fp32(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``multiply`` of floating-point operands in fp32, its result rounded to the first one's dtype.

    fp64 stays. Integer operands and options are handed on as they are.
    """

    def wide(first: Tensor, *others: Tensor, **options: object) -> Tensor:
        dtype = compute_dtype(first.dtype)
        operands = (x.to(dtype) if x.is_floating_point() else x for x in (first, *others))
        return multiply(*operands, **options).to(first.dtype)

    return wide


def widened(product: Product) -> Product:
    """``product`` and its gradients in fp32, rounded."""
    return replace(
        product,
        value=in_fp32(product.value),
        input_gradient=in_fp32(product.input_gradient),
        weight_gradient=in_fp32(product.weight_gradient),
    )


def widen(model: nn.Module) -> None:
    """Make all products of ``model`` in fp32, attention's among them; fp32 models compute as before."""
    wrap_products(model, widened)
    for module in model.modules():
        if isinstance(module, MLA):
            module.core.kernel = AttentionKernel(*map(in_fp32, module.core.kernel))
