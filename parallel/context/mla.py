"""MLA over a cut sequence: every rank attends over the whole sequence with its share of the heads.

    latent, shared key   gathered: R + P numbers a token            backward: reduce-scatter
    queries              all-to-all: own tokens, all heads -> all tokens, own heads
    keys, values         up-projection of the own heads only
    attention            as on one rank, causal inside each document
    outputs              all-to-all back

The work is equal on every rank, causal or not, however the documents lie, and nothing is computed twice. The
up-projection's gradient on a rank is that of its heads; the sum over dp x cp, which every gradient goes through,
completes it.

Where cp does not divide the heads, the *gather form* takes over: own queries, all heads, against the keys and
values of the document so far, rebuilt on every rank. It is not balanced: later slices see more keys.

Shapes: T tokens, H heads, Q = N + P query, R latent rank, P shared key, V value.
"""

from dataclasses import replace

import torch
from torch import Tensor

from model.documents import Documents
from model.mla import expand_latent
from model.products import Product
from model.seams import AttentionCore, AttentionKernel, MLACache
from model.stats import LayerStats
from parallel.collectives import all_gather, all_to_all
from parallel.context.layout import SlicedDocuments
from parallel.mesh import Axis

# Queries whose mask exists at once in the gather form.
QUERY_TILE = 512


class ContextMLA:
    """`model.seams.AttentionCore` on a slice of the sequence; decoding with a cache is local.

    Each rank raises the largest logits of what it computed; the step takes the maximum over ranks.

    Args:
        local: the core that stood here; it decodes, and attends with this rank's heads.
        axis: cp.
    """

    def __init__(self, local: AttentionCore, axis: Axis) -> None:
        self.axis = axis
        self.local = local

    @property
    def kernel(self) -> AttentionKernel:
        """Of both forms."""
        return self.local.kernel

    @kernel.setter
    def kernel(self, kernel: AttentionKernel) -> None:
        self.local.kernel = kernel

    def __call__(
        self,
        q_BTHQ: Tensor,
        latent_BTR: Tensor,
        shared_key_BTP: Tensor,
        up_weight: Tensor,
        *,
        product: Product,
        value_dim: int,
        documents: Documents,
        stats: LayerStats | None,
        cache: MLACache | None,
    ) -> Tensor:
        if cache is not None:
            return self.local(
                q_BTHQ,
                latent_BTR,
                shared_key_BTP,
                up_weight,
                product=product,
                value_dim=value_dim,
                documents=documents,
                stats=stats,
                cache=cache,
            )
        assert isinstance(documents, SlicedDocuments), "context parallel needs the documents of a slice"
        widths = [latent_BTR.shape[-1], shared_key_BTP.shape[-1]]
        whole = all_gather(torch.cat([latent_BTR, shared_key_BTP], dim=-1), self.axis, dim=1)
        latent, shared_key = whole.split(widths, dim=-1)
        if q_BTHQ.shape[2] % self.axis.size:
            return attend_own_queries(
                q_BTHQ,
                latent,
                shared_key,
                up_weight,
                product=product,
                kernel=self.kernel,
                value_dim=value_dim,
                documents=documents,
                stats=stats,
            )
        heads = q_BTHQ.shape[2] // self.axis.size
        first = self.axis.rank * heads
        if stats is not None and stats.max_logit_H is not None:
            stats = replace(stats, max_logit_H=stats.max_logit_H.narrow(0, first, heads))
        o = self.local(
            tokens_to_heads(q_BTHQ, self.axis),
            latent,
            shared_key,
            up_weight.unflatten(0, (heads * self.axis.size, -1)).narrow(0, first, heads).flatten(0, 1),
            product=product,
            value_dim=value_dim,
            documents=documents.whole,
            stats=stats,
            cache=None,
        )
        return heads_to_tokens(o, self.axis)


def tokens_to_heads(x: Tensor, axis: Axis) -> Tensor:
    """[1, T / cp, H, Q] -> [1, T, H / cp, Q]: own tokens of all heads to all tokens of own heads."""
    rows = [x.shape[1]] * axis.size
    by_rank = x[0].unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 1)
    return all_to_all(by_rank, axis, send=rows, receive=rows).unsqueeze(0)


def heads_to_tokens(x: Tensor, axis: Axis) -> Tensor:
    """The way back of `tokens_to_heads`."""
    rows = [x.shape[1] // axis.size] * axis.size
    by_rank = all_to_all(x[0], axis, send=rows, receive=rows)
    return by_rank.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2).unsqueeze(0)


def attend_own_queries(
    q_BTHQ: Tensor,
    latent: Tensor,
    shared_key: Tensor,
    up_weight: Tensor,
    *,
    product: Product,
    kernel: AttentionKernel,
    value_dim: int,
    documents: SlicedDocuments,
    stats: LayerStats | None,
) -> Tensor:
    """The gather form: attended values [1, T / cp, H, V] of the slice's queries.

    Args:
        q_BTHQ: queries of the slice.
        latent, shared_key: of the whole sequence.
        up_weight, product, kernel, value_dim: as for `model.seams.AttentionCore`.
        documents: of the slice.
        stats: takes the largest logit of each head among these queries.
    """
    heads, q_dim = q_BTHQ.shape[2:]
    # Of the sequence, only what the slice's documents can see: from the first one's beginning on.
    seen = slice(documents.first_start, documents.start + documents.length)
    q = q_BTHQ.transpose(1, 2)
    k, v = expand_latent(
        latent[:, seen], shared_key[:, seen], up_weight, product=product, heads=heads, value_dim=value_dim
    )
    past = documents.start - documents.first_start
    outputs = []
    for begin, end in documents.spans():
        first_key = begin + past if begin else 0
        for start in range(begin, end, QUERY_TILE):
            stop = min(start + QUERY_TILE, end)
            keys = slice(first_key, stop + past)
            q_tile, k_tile, v_tile = q[:, :, start:stop], k[:, :, keys], v[:, :, keys]
            shape = stop - start, k_tile.shape[2]
            visible = torch.ones(shape, dtype=torch.bool, device=q.device).tril(shape[1] - shape[0])
            outputs.append(kernel.attend(q_tile, k_tile, v_tile, attn_mask=visible, scale=q_dim**-0.5))
            if stats is not None and stats.max_logit_H is not None:
                _track_max_logit(q_tile.detach(), k_tile.detach(), visible, stats.max_logit_H, kernel=kernel)
    return torch.cat(outputs, dim=2)[..., :value_dim].transpose(1, 2)


@torch.no_grad()
def _track_max_logit(
    q_BHTQ: Tensor, k_BHSQ: Tensor, visible_TS: Tensor, max_logit_H: Tensor, *, kernel: AttentionKernel
) -> None:
    logits = kernel.multiply(q_BHTQ, k_BHSQ.mT).float() * q_BHTQ.shape[-1] ** -0.5
    largest_H = logits.masked_fill_(~visible_TS, -torch.inf).amax(dim=(0, 2, 3))
    torch.maximum(max_logit_H, largest_H, out=max_logit_H)
