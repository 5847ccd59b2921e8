"""QK-Clip: hold each head's attention logits below tau by scaling its query and key weights.

After the update, a head whose largest logit S of the step exceeded tau has its logits multiplied by
``gamma = tau / S``: its query and key rows without position by ``sqrt(gamma)`` each, its positional query
rows by ``gamma``, because the positional key is shared by all heads and is left alone
(Kimi K2 technical report, arXiv 2507.20534, algorithm 1). KDA has unit-norm queries and keys and needs none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class QKClipTarget:
    """Where one MLA layer keeps its query and key weights.

    query: parameter [heads * (nope + rope), in], rows of each head in that order.
    key_value: parameter [heads * (nope + value), in], rows of each head in that order.
    heads: that this rank holds.
    first: which of the layer's heads is the first of them.
    """

    query: str
    key_value: str
    heads: int
    nope: int
    rope: int
    value: int
    first: int = 0


@torch.no_grad()
def qk_clip(weights: Mapping[str, Tensor], *, targets: Sequence[QKClipTarget], max_logits: Tensor, tau: float) -> None:
    """Scale, in place, those target weights that ``weights`` holds (a rank holds what it owns).

    Args:
        weights: by name; may lack some of the targets' parameters.
        targets: MLA layers in order.
        max_logits: [len(targets), all heads] largest scaled logits of the step over all ranks; -inf where a
            head saw no token.
        tau: the bound, above 0.
    """
    if not targets:
        return
    logits = max_logits.double()
    gammas = torch.where(logits > tau, tau / logits, 1.0)
    for target, all_gammas in zip(targets, gammas, strict=True):
        gamma_H = all_gammas[target.first : target.first + target.heads]
        if target.query in weights:
            query = weights[target.query]
            rows = query.unflatten(0, (target.heads, target.nope + target.rope))
            factor = gamma_H.to(query).view(-1, 1, 1)
            rows[:, : target.nope].mul_(factor.sqrt())
            rows[:, target.nope :].mul_(factor)
        if target.key_value in weights:
            key_value = weights[target.key_value]
            rows = key_value.unflatten(0, (target.heads, target.nope + target.value))
            rows[:, : target.nope].mul_(gamma_H.to(key_value).view(-1, 1, 1).sqrt())
