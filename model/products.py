"""Products of rows and weights: one record that says how, one autograd function that runs it.

    value            y  = x W^T
    input_gradient   dx = dy W
    weight_gradient  dW = dy^T x

Every module that owns a factor of a product has its record as the attribute ``product``: `model.layers.Linear` (MLA's
key/value up-projection and the head among them), `model.moe.Experts`, `model.router.Router`. Whoever changes how
products are made *wraps the record that is there* (`wrap_products`), and each concern changes one thing:

    kernel choice   the three functions           `model.widen`
    quantisation    their operands
    deferral        when the third one is called  ``put_off``, `parallel.pipeline.deferred`
    observation     nothing: it looks at what passes
    a loan          where W is read from          ``again``, an argument of the call, `parallel.expert.weights`

So wrappers compose in any order, and home and borrowed experts see the same ones. A product is plain, or grouped: then
a third argument says where each segment of rows ends, and every segment meets a weight of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.kernels.grouped_linear import grouped_input_gradient, grouped_linear, grouped_weight_gradient

PutOff = Callable[[nn.Parameter, Callable[[], Tensor]], None]
"""Takes a parameter and the call that makes its gradient, which whoever puts it off makes later."""


@dataclass(frozen=True)
class Product:
    """How a product and its two gradients are made.

    value: (x, weight, *segment_ends) to y.
    input_gradient: (gradient of y, weight, *segment_ends) to the gradient of x.
    weight_gradient: (gradient of y, x, *segment_ends) to the gradient of weight.
    put_off: takes the gradients of parameters out of backward's hands; None: backward makes them.
    """

    value: Callable[..., Tensor]
    input_gradient: Callable[..., Tensor]
    weight_gradient: Callable[..., Tensor]
    put_off: PutOff | None = None

    def __call__(
        self, x: Tensor, weight: Tensor, *segment_ends: Tensor, again: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """The product, differentiable once in ``x`` and ``weight``.

        Args:
            x: [..., I]; grouped: [R, I], rows sorted by segment.
            weight: [O, I]; grouped: [S, O, I].
            segment_ends: none; grouped: int32 [S], rising, the last one R.
            again: the weight once more, for backward; None: backward reads the one that the graph keeps.

        Returns:
            [..., O] in x's dtype.
        """
        if not torch.is_grad_enabled():
            return self.value(x, weight, *segment_ends)
        # A weight made from others takes part in a graph of its own, which wants the gradient now; and where x wants
        # none, backward never comes by.
        if self.put_off is not None and x.requires_grad and isinstance(weight, nn.Parameter) and weight.requires_grad:
            return _Multiply.apply(x, None, _Call(self, lambda: weight, weight), *segment_ends)
        return _Multiply.apply(x, weight, _Call(self, again), *segment_ends)


class _Call(NamedTuple):
    """One product under way to its backward.

    again: reads the weight in backward; None: the graph keeps it.
    parameter: whose gradient is put off. It stands here and outside the graph, since an edge to it would bring it a
        gradient in backward, of None.
    """

    product: Product
    again: Callable[[], Tensor] | None
    parameter: nn.Parameter | None = None


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, call: _Call, *segment_ends: Tensor) -> Tensor:
        ctx.call = call
        x_wanted = call.parameter is not None or ctx.needs_input_grad[1]
        weight_wanted = call.again is None and ctx.needs_input_grad[0]
        ctx.save_for_backward(x if x_wanted else None, weight if weight_wanted else None, *segment_ends)
        return call.product.value(x, call.parameter if weight is None else weight, *segment_ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *segment_ends = ctx.saved_tensors
        product, again, parameter = ctx.call
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product.input_gradient(grad, weight if again is None else again(), *segment_ends)
        if parameter is not None:
            # Detached, or waiting would keep the graph.
            product.put_off(parameter, partial(product.weight_gradient, grad, x.detach(), *segment_ends))
        elif ctx.needs_input_grad[1]:
            grad_weight = product.weight_gradient(grad, x, *segment_ends)
        return grad_x, grad_weight, None, *(None for _ in segment_ends)


def _input_gradient(grad: Tensor, weight_OI: Tensor) -> Tensor:
    return (grad.flatten(0, -2) @ weight_OI).unflatten(0, grad.shape[:-1])


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


DENSE = Product(F.linear, _input_gradient, _weight_gradient)
"""``x W^T`` without bias."""

GROUPED = Product(grouped_linear, grouped_input_gradient, grouped_weight_gradient)
"""`model.kernels.grouped_linear`."""


def wrap_products(model: nn.Module, wrap: Callable[[Product], Product]) -> None:
    """Replace every product of ``model`` by what ``wrap`` makes of it."""
    for module in model.modules():
        product = getattr(module, "product", None)
        if isinstance(product, Product):
            module.product = wrap(product)  # type: ignore[assignment]
