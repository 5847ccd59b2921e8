"""Weight gradients put off: backward keeps what they are made of, and a later action makes them.

Backward through ``y = x W^T`` makes two products. The stage before waits for the input's gradient ``dy W``; nobody
waits for the weight's ``dy^T x`` until the step ends. With `DeferredGradients` installed, backward makes only the
first, and (W, x, dy) wait for the schedule's W action. This holds for `model.layers.Linear` and for the experts'
grouped product; every other parameter's gradient comes with backward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.kernels.grouped_linear import grouped_linear, grouped_weight_gradient
from model.kimi import KimiModel
from model.layers import Linear
from model.moe import MoE


class Deferred(NamedTuple):
    """One weight gradient to be made: that of ``weight``, by calling ``make``."""

    weight: Tensor
    make: Callable[[], Tensor]


class DeferredGradients:
    """Collects the weight gradients that the backward passes of a model's products leave to be made."""

    def __init__(self) -> None:
        self._waiting: list[Deferred] = []

    def take(self) -> list[Deferred]:
        """What has been put off since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def put(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """Put off a gradient."""
        self._waiting.append(Deferred(weight, make))

    def install(self, model: KimiModel) -> None:
        """Replace the products of ``model``; passes without gradients run as before."""
        for module in model.modules():
            if type(module) is Linear:
                _install_linear(module, self)
            elif isinstance(module, MoE):
                module.product = _Grouped(self)


def _install_linear(linear: Linear, queue: DeferredGradients) -> None:
    def forward(x: Tensor) -> Tensor:
        if not _defers(x, linear.weight):
            return F.linear(x, linear.weight)
        return _Linear.apply(x, _Target(linear.weight, queue))

    linear.forward = forward  # type: ignore[method-assign]


def _defers(x: Tensor, weight: Tensor) -> bool:
    """Not in passes without gradients, nor for weights made from others, whose gradient backward itself passes on."""
    return torch.is_grad_enabled() and x.requires_grad and isinstance(weight, nn.Parameter) and weight.requires_grad


class _Target(NamedTuple):
    """A weight outside the graph (with an edge to it backward would bring it a gradient, of None), and its queue."""

    weight: Tensor
    queue: DeferredGradients


class _Grouped:
    """`model.kernels.grouped_linear` with its weight gradient put off."""

    def __init__(self, queue: DeferredGradients) -> None:
        self.queue = queue

    def __call__(self, rows_RI: Tensor, weight_SOI: Tensor, segment_ends_S: Tensor) -> Tensor:
        if not _defers(rows_RI, weight_SOI):
            return grouped_linear(rows_RI, weight_SOI, segment_ends_S)
        return _GroupedLinear.apply(rows_RI, segment_ends_S, _Target(weight_SOI, self.queue))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: _Target) -> Tensor:
        ctx.save_for_backward(x)
        ctx.target = target
        return F.linear(x, target.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Detached, or waiting would keep the graph.
        x = ctx.saved_tensors[0].detach()
        weight, queue = ctx.target
        queue.put(weight, lambda: grad.flatten(0, -2).T @ x.flatten(0, -2))
        return grad @ weight, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, segment_ends_S: Tensor, target: _Target) -> Tensor:
        ctx.save_for_backward(rows_RI, segment_ends_S)
        ctx.target = target
        return grouped_linear(rows_RI, target.weight, segment_ends_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None]:
        rows_RI, segment_ends_S = (saved.detach() for saved in ctx.saved_tensors)
        weight_SOI, queue = ctx.target
        grad_RO = grad_RO.contiguous()
        queue.put(weight_SOI, lambda: grouped_weight_gradient(grad_RO, rows_RI, segment_ends_S))
        return grouped_linear(grad_RO, weight_SOI.transpose(1, 2), segment_ends_S), None, None
