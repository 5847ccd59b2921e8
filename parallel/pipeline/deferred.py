"""Weight gradients put off: backward keeps what they are made of, and a later action makes them.

Backward through ``y = x W^T`` makes two products. The stage before waits for the input's gradient ``dy W``; nobody
waits for the weight's ``dy^T x`` until the step ends. With `DeferredGradients` installed, backward makes only the
first, and (W, x, dy) wait for the schedule's W action. This holds for every product of the model with a parameter
(`model.products`); the head's, which is part of the loss, and every other parameter's gradient come with backward.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from model.products import wrap_products


class Deferred(NamedTuple):
    """One weight gradient to be made: that of ``weight``, by calling ``make``."""

    weight: nn.Parameter
    make: Callable[[], Tensor]


class DeferredGradients:
    """Collects the weight gradients that the backward passes of a model's products leave to be made."""

    def __init__(self) -> None:
        self._waiting: list[Deferred] = []

    def take(self) -> list[Deferred]:
        """The weight gradients that were put off since the last call."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def put(self, weight: nn.Parameter, make: Callable[[], Tensor]) -> None:
        """Put off a gradient."""
        self._waiting.append(Deferred(weight, make))

    def install(self, model: nn.Module) -> None:
        """Put off the gradients of all products of ``model``; passes without gradients run as before."""
        wrap_products(model, lambda product: replace(product, put_off=self.put))


def deferral(schedule: str) -> DeferredGradients | None:
    """A collector for a schedule whose weight gradients are made in actions of their own; None for the others."""
    return DeferredGradients() if schedule == "zero_bubble" else None
