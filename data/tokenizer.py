"""Tokenizers: training a byte-level BPE, and loading any `tokenizers` file so that it does nothing of its own.

Byte-level, because then every text has ids: there is no unknown token, and decoding gives back the text. A tokenizer
that is given is a file, a folder or a name on the Hugging Face hub; Kimi's own ``tiktoken.model`` is one too.
"""

import codecs
import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.edges import InputError, edge, place_error
from data.tiktoken_file import is_ranks, tokenizer_of_ranks

TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")
"""What is looked for in a folder or on the hub, in this order."""
HUB = "hub:"

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


def read_tokenizer(given: str) -> str:
    """Text of the ``tokenizer.json`` that a user means; Kimi's ``tiktoken.model`` is made into one.

    Args:
        given: a file, a folder with one of `TOKENIZER_FILES`, or a name on the Hugging Face hub, with or without
            ``hub:`` before it.

    Raises:
        InputError: there is none, or it is no tokenizer.
    """
    path = _find_tokenizer(given)
    with edge(f"--tokenizer={given}", remedy="name a tokenizer.json, a tiktoken.model or a folder with one"):
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if is_ranks(raw):
        with edge(f"--tokenizer={path}", remedy="copy it again"):
            return tokenizer_of_ranks(raw, path=path)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        what = "seems to be a SentencePiece model" if path.suffix == ".model" else "is binary or compressed"
        raise InputError(
            f"--tokenizer={path}: {what} and must be a tokenizer.json or a tiktoken.model; convert or unpack it"
        ) from None
    _parse(text, path)
    return text


def _find_tokenizer(given: str) -> Path:
    """The file that is meant, downloaded if it is on the hub."""
    if (problem := place_error("--tokenizer", given)) is not None:
        raise InputError(problem)
    path = Path(os.path.expanduser(given.removeprefix(HUB)))
    with edge(f"--tokenizer={given}", remedy="name a tokenizer.json, a tiktoken.model or a folder with one"):
        if not given.startswith(HUB) and path.is_dir():
            found = [path / name for name in TOKENIZER_FILES if (path / name).exists()]
            if not found:
                raise InputError(
                    f"--tokenizer={given}: has no {' or '.join(TOKENIZER_FILES)}; name a folder that has one"
                )
            return found[0]
        # A name on the hub has at most one slash, and a file that is meant has a suffix or begins at a folder.
        is_name = given.startswith(HUB) or (
            given.count("/") <= 1 and given[:1] not in "/.~" and path.suffix not in (".json", ".model", ".gz")
        )
        if path.exists() and not path.is_file():
            raise InputError(f"--tokenizer={given}: is neither file nor folder; write it to a file first")
        if path.exists() or not is_name:
            return path
    return _download(given)


def _download(given: str) -> Path:
    """The tokenizer's file of a model on the hub; what names Kimi's special tokens comes with it."""
    import huggingface_hub  # slow to import, and needed for this alone

    name = given.removeprefix(HUB)
    remedy = "name a tokenizer.json, a folder with one, or a model on the hub that has one, and see to the network"
    with edge(f"--tokenizer={given}", remedy=remedy):
        present = huggingface_hub.list_repo_files(name)
        for file in TOKENIZER_FILES:
            if file in present:
                if file != "tokenizer.json" and "tokenizer_config.json" in present:
                    huggingface_hub.hf_hub_download(name, "tokenizer_config.json")
                return Path(huggingface_hub.hf_hub_download(name, file))
    raise InputError(f"--tokenizer={given}: has no {' or '.join(TOKENIZER_FILES)} on the hub; name another")


def _parse(text: str, path: Path) -> Tokenizer:
    """
    Raises:
        InputError: it is no tokenizer.
    """
    with edge(f"--tokenizer={path}", what="is not a tokenizer.json", remedy="name one"):
        return Tokenizer.from_str(text)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a ``tokenizer.json`` and turn off what it may do besides tokenising: truncation, which drops text silently,
    padding, and reading the name of a special token inside a text as that token.

    Raises:
        InputError: no such file, or not a tokenizer.
    """
    with edge(f"--tokenizer={path}", remedy="name a tokenizer.json"):
        text = path.read_text(encoding="utf-8")
    tokenizer = _parse(text, path)
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
