"""Recurrent decoding: one token in, one distribution out, at a cost that barely grows with the text.

A KDA layer carries its state and the last inputs of its convolutions, an MLA layer its latent cache. Token
by token this equals the full forward pass.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model.kimi import KimiModel, LayerCache


class Decoder:
    """Decodes ``batch`` documents side by side.

    Example: ``decoder = Decoder(model, batch=1); logits = decoder.feed(prompt)[:, -1]``.
    """

    def __init__(self, model: KimiModel, *, batch: int) -> None:
        self.model = model
        self.caches: list[LayerCache] = [layer.mixer.empty_cache(batch) for layer in model.layers]  # type: ignore[union-attr,operator]

    @torch.no_grad()
    def feed(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V] after each of the new tokens, which continue what was fed before."""
        hidden = self.model.hidden(ids_BT, caches=self.caches)
        return self.model.head(hidden)


def generate(
    model: KimiModel, prompt_T: Tensor, *, tokens: int, temperature: float, seed: int, stop: int | None = None
) -> Iterator[int]:
    """Sample a continuation from a model on one rank, token by token; see `continue_text`."""
    feed = Decoder(model, batch=1).feed
    return continue_text(feed, prompt_T, tokens=tokens, temperature=temperature, seed=seed, stop=stop)


def continue_text(
    feed: Callable[[Tensor], Tensor],
    prompt_T: Tensor,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    stop: int | None = None,
) -> Iterator[int]:
    """Sample a continuation, token by token.

    Args:
        feed: takes new tokens [1, T] and returns logits [1, ., V], of which the last row is after the last token;
            `Decoder.feed`, or what stands in for it.
        prompt_T: int64 ids, at least one.
        tokens: most tokens to sample.
        temperature: 0 takes the likeliest token.
        seed: of a generator of its own, so sampling disturbs no other random stream.
        stop: id that ends the text (itself not returned).

    Raises:
        ValueError: an empty prompt or a negative temperature.
    """
    if prompt_T.numel() == 0:
        raise ValueError("prompt: must hold at least one token; begin with the end-of-text token")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must be at least 0; 0 is greedy")
    generator = torch.Generator().manual_seed(seed)
    new = prompt_T.unsqueeze(0)
    for _ in range(tokens):
        logits_V = feed(new)[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial((logits_V / temperature).softmax(dim=0), 1, generator=generator))
        if token == stop:
            return
        yield token
        new = prompt_T.new_tensor([[token]])
