"""Tokenizers: training a byte-level BPE, and loading any `tokenizers` file so that it does nothing of its own.

Byte-level, because then every text has ids: there is no unknown token, and decoding gives back the text.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

KNOWN_EOS = (
    EOS,
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOS]",
)
"""Names of the end-of-text token in common vocabularies, tried in this order."""


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> str:
    """Train a byte-level BPE and return the text of its ``tokenizer.json``. The same texts give the same file.

    Args:
        texts: a sample of what will be tokenised.
        vocab_size: bytes, special tokens and merges together; fewer come out of too little text.

    Raises:
        ValueError: ``vocab_size`` has no room for the bytes and the special tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size}: must be at least {MIN_VOCAB_SIZE}, the bytes and the special tokens; raise it"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer.to_str(pretty=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a ``tokenizer.json`` for encoding whole documents.

    What such a file may carry for other uses is switched off: truncation, which would drop text silently,
    padding, and reading the name of a special token inside a text as that token.

    Raises:
        ValueError: no such file, or not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--tokenizer={path}: cannot be read ({error.strerror}); name a tokenizer.json") from None
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"--tokenizer={path}: is not a tokenizer.json ({error}); name one") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Largest id plus one, added tokens included; ids may have gaps, so not the number of tokens."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def eos_id_of(tokenizer: Tokenizer, name: str | None = None) -> int:
    """Id of the end-of-text token.

    Args:
        name: of the token; the first of `KNOWN_EOS` that exists by default.

    Raises:
        ValueError: there is none.
    """
    for candidate in (name,) if name is not None else KNOWN_EOS:
        if (found := tokenizer.token_to_id(candidate)) is not None:
            return found
    tried = name if name is not None else ", ".join(KNOWN_EOS)
    raise ValueError(
        f"append_eos: the tokenizer has no end-of-text token {tried}; name its own with --eos-token or "
        "use --no-append-eos"
    )
