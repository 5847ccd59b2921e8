"""KimiModel: embedding, layers, output mix, head.

    layer i:  h = mix(bank + [prefix]);  maybe close the block;  prefix += mixer(norm(h))
              h = mix(bank + [prefix]);  maybe close the block;  prefix += feed_forward(norm(h))

`begin`, `run_layers` and `finish` take and give an explicit `ResidualState`, so a pipeline stage is the same code as
the whole model. Shapes: B batch, T tokens, D model, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from model.attn_residual import ResidualMix, ResidualState, begins_block
from model.config import ModelConfig
from model.documents import Documents
from model.kda import KDA
from model.layers import Activation, Embedding, GatedFFN, Linear, RMSNorm
from model.mla import MLA
from model.moe import MoE
from model.params import ParamRole
from model.router import Decisions
from model.seams import KDACache, MLACache
from model.stats import ForwardStats, LayerStats

LayerCache = KDACache | MLACache


class Block(nn.Module):
    """One layer: a mixer (KDA or MLA) and a feed-forward (dense or experts), each reading its own mix."""

    def __init__(self, index: int, config: ModelConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_dim, config.norm_eps
        activation = Activation(config.activation, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
        block = config.residual_block
        self.index = index
        self.closes = begins_block(2 * index, block), begins_block(2 * index + 1, block)
        self.mixer_mix = ResidualMix(dim, eps=eps) if block is not None else None
        self.mixer_norm = RMSNorm(dim, eps=eps)
        self.mixer: KDA | MLA
        if config.mixers[index] == "K":
            self.mixer = KDA(dim, config.kda, norm_eps=eps)
        else:
            self.mixer = MLA(dim, config.mla, latent_norm_eps=config.latent_norm_eps)
        self.ffn_mix = ResidualMix(dim, eps=eps) if block is not None else None
        self.ffn_norm = RMSNorm(dim, eps=eps)
        self.ffn: GatedFFN | MoE
        if config.is_moe(index):
            self.ffn = MoE(dim, config.moe, activation=activation, norm_eps=eps)
        else:
            self.ffn = GatedFFN(dim, config.dense_dim, activation=activation)
        self.run: Callable[..., ResidualState] = Block.compute

    def forward(
        self,
        state: ResidualState,
        *,
        documents: Documents,
        stats: LayerStats | None = None,
        cache: LayerCache | None = None,
        decisions: Decisions | None = None,
    ) -> ResidualState:
        """``decisions``: of an earlier pass over the same state, where this one repeats it."""
        return self.run(self, state, documents=documents, stats=stats, cache=cache, decisions=decisions)

    def compute(
        self,
        state: ResidualState,
        *,
        documents: Documents,
        stats: LayerStats | None = None,
        cache: LayerCache | None = None,
        decisions: Decisions | None = None,
    ) -> ResidualState:
        """What `forward` runs unless ``run`` is wrapped."""
        h_BTD = self.mixer_norm(read(self.mixer_mix, state))
        if self.closes[0]:
            state = state.close_block()
        if isinstance(self.mixer, KDA):
            state = state.add(self.mixer(h_BTD, documents=documents, cache=cache))
        else:
            state = state.add(self.mixer(h_BTD, documents=documents, stats=stats, cache=cache))
        h_BTD = self.ffn_norm(read(self.ffn_mix, state))
        if self.closes[1]:
            state = state.close_block()
        if isinstance(self.ffn, MoE):
            return state.add(self.ffn(h_BTD, stats=stats, decisions=decisions))
        return state.add(self.ffn(h_BTD))


def read(mix: ResidualMix | None, state: ResidualState) -> Tensor:
    """What a sublayer sees: the mix, or with the plain residual the stream itself."""
    if mix is not None:
        return mix(state)
    assert state.prefix is not None, "the plain residual never closes a block"
    return state.prefix


class KimiModel(nn.Module):
    """A Kimi-style language model: ``model(input_ids) -> logits``.

    Parameters come uninitialised: follow with `model.params.initialize` or load weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, eps = config.hidden_dim, config.norm_eps
        self.embed = Embedding(config.vocab_size, dim, padding_id=config.padding_id)
        self.layers = nn.ModuleList(Block(i, config) for i in range(config.num_layers))
        self.output_mix = ResidualMix(dim, eps=eps) if config.residual_block is not None else None
        self.norm = RMSNorm(dim, eps=eps)
        self.head = Linear(dim, config.vocab_size, role=ParamRole(kind="embedding"))
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def begin(self, input_ids: Tensor) -> ResidualState:
        """The state before the first layer, of int64 ids [B, T]."""
        return ResidualState(self.embed(input_ids))

    def run_layers(
        self,
        state: ResidualState,
        first: int,
        last: int,
        *,
        documents: Documents,
        stats: ForwardStats | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> ResidualState:
        """Layers ``first`` to ``last`` - 1 (counted from 0) on a residual state."""
        for index in range(first, last):
            state = self.layers[index](
                state,
                documents=documents,
                stats=None if stats is None else stats.layer(index),
                cache=None if caches is None else caches[index],
            )
        return state

    def finish(self, state: ResidualState) -> Tensor:
        """Normalised last hidden states [B, T, D], of the state after the last layer."""
        return self.norm(read(self.output_mix, state))

    def hidden(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        documents: Documents | None = None,
        stats: ForwardStats | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Normalised last hidden states [B, T, D]: what the head (or the chunked loss) reads.

        Args:
            input_ids: int64 [B, T].
            cu_seqlens: int [N + 1] document boundaries over T, with B = 1; None: one document a row.
            documents: what ``cu_seqlens`` would say, where the caller has described the documents already.
            stats: takes router statistics and attention logits of this pass.
            caches: one per layer when decoding, brought up to date in place (see `model.generate`).

        Raises:
            ValueError: malformed ``cu_seqlens``.
        """
        if documents is None:
            batch, length = input_ids.shape
            documents = Documents.of(batch, length, cu_seqlens, input_ids.device)
        state = self.begin(input_ids)
        state = self.run_layers(state, 0, len(self.layers), documents=documents, stats=stats, caches=caches)
        return self.finish(state)

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, *, stats: ForwardStats | None = None
    ) -> Tensor:
        """Logits [B, T, V]; arguments as in `hidden`."""
        return self.head(self.hidden(input_ids, cu_seqlens, stats=stats))


def build_on_meta(config: ModelConfig) -> KimiModel:
    """The model's structure without memory, for counting and planning."""
    with torch.device("meta"):
        return KimiModel(config)
