"""What a forward pass reports besides its output: router histograms, expert loads, attention logits.

The model writes into an object that the caller hands in, so nothing is counted behind anyone's back: a
recomputed forward or an evaluation passes none and counts nothing. The tensors have one fixed shape over
all layers, so a step reduces them with one sum and one maximum, whatever was routed.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig


@dataclass(frozen=True)
class LayerStats:
    """One layer's rows of `ForwardStats`; only those of its kind are there.

    histogram_EB: int32 [E, bins] required-bias histogram (quantile balancing).
    load_E: int64 [E] tokens routed to each expert.
    max_logit_H: fp32 [H] largest scaled attention logit of each head.
    valid_BT: bool [B, T], tokens that count; None: all.
    dispatch: an expert layer's record for its dispatcher, see `ForwardStats`.
    """

    histogram_EB: Tensor | None
    load_E: Tensor | None
    max_logit_H: Tensor | None
    valid_BT: Tensor | None
    dispatch: object | None = None


class ForwardStats:
    """Accumulates over the microbatches of one step.

    Args:
        config: the model's.
        device: where the model runs.
        max_logits: track attention logits (an extra pass over queries and keys; QK-Clip needs it).
        layers: indices of the layers that will run; None: all.
        dispatch: makes the record of one expert layer in which its dispatcher counts what it moves; the model hands
            the record on and never reads it. None: no records.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        max_logits: bool,
        layers: Collection[int] | None = None,
        dispatch: Callable[[], object] | None = None,
    ) -> None:
        held = range(config.num_layers) if layers is None else layers
        moe = [layer for layer in config.moe_layers if layer in held]
        mla = [layer for layer in config.mla_layers if layer in held]
        bins = config.moe.histogram_bins if config.moe.balancing == "quantile" else 0
        self.moe_layers, self.mla_layers = tuple(moe), tuple(mla)
        self.valid_BT: Tensor | None = None
        # A count is at most the tokens of one step, so 32 bits hold it; at K3's size that halves 0.7 GB.
        self.histogram = torch.zeros(len(moe), config.moe.experts, bins, dtype=torch.int32, device=device)
        self.load = torch.zeros(len(moe), config.moe.experts, dtype=torch.int64, device=device)
        self.dispatch = tuple(None if dispatch is None else dispatch() for _ in moe)
        heads = config.mla.heads if max_logits else 0
        self.max_logit = torch.full((len(mla), heads), -torch.inf, dtype=torch.float32, device=device)

    def layer(self, index: int) -> LayerStats:
        """The rows of layer ``index`` (counted from 0)."""
        histogram = load = max_logit = record = None
        if index in self.moe_layers:
            row = self.moe_layers.index(index)
            load, record = self.load[row], self.dispatch[row]
            histogram = self.histogram[row] if self.histogram.shape[-1] else None
        if index in self.mla_layers and self.max_logit.shape[-1]:
            max_logit = self.max_logit[self.mla_layers.index(index)]
        return LayerStats(histogram, load, max_logit, self.valid_BT, record)
