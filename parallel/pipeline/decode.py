"""Decoding on a pipeline: each token's state passes all stages, and every rank gets the logits and samples alike."""

from typing import cast

from torch import Tensor

from model.kimi import Block, LayerCache
from parallel.pipeline.runtime import Pipeline


class PipelineDecoder:
    """Decodes one document, as `model.generate.Decoder` does on one rank. All ranks feed the same tokens."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        caches = [layer.mixer.empty_cache(1) if isinstance(layer, Block) else None for layer in pipeline.model.layers]
        # Those of other ranks' layers are never read.
        self.caches = cast("list[LayerCache]", caches)

    def feed(self, ids_BT: Tensor) -> Tensor:
        """Logits [1, 1, V] after the last of the new tokens, which continue what was fed before."""
        return self.pipeline.decode(ids_BT, self.caches)
