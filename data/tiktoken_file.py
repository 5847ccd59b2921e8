"""Kimi's tokenizer as it is published, ``tiktoken.model``, made into a ``tokenizer.json`` with the same ids.

The file has a token's bytes in base64 and its rank on each line. tiktoken cuts a text by a pattern and then merges, in
each part, the neighbours whose bytes together have the lowest rank. `tokenizers` merges by a list of pairs instead.
The pair that makes a token is the one that is left of its bytes after all merges of lower rank: no merge across its
borders can have come before, since a border that is gone does not come back, so inside them everything went as if the
token stood alone. One pair per token therefore gives the same ids.

Kimi's own code also cuts runs of more than 25,000 characters without, or of nothing but, white space, and texts of more
than 400,000, before tiktoken sees them; here a text is whole.

The tokens above the last rank are named in the ``tokenizer_config.json`` beside it. Pattern, 256 reserved tokens and
their names are those of Kimi K2, Kimi Linear and Kimi K3, which share one vocabulary.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from data.edges import InputError, edge

RESERVED = 256
"""Special tokens after the last rank."""
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Where Kimi cuts a text: Han characters apart from other letters, numbers in threes."""


def is_ranks(raw: bytes) -> bool:
    """Whether bytes look like a ``tiktoken.model``: base64, a space and a number on the first line."""
    fields = raw[:4096].split(b"\n", 1)[0].split()
    try:
        return len(fields) == 2 and bool(base64.b64decode(fields[0], validate=True)) and int(fields[1]) >= 0
    except ValueError:
        return False


def tokenizer_of_ranks(raw: bytes, *, path: Path) -> str:
    """Text of the ``tokenizer.json`` that does what tiktoken does with these ranks and Kimi's pattern.

    Args:
        raw: content of a ``tiktoken.model``.
        path: where it lies; a ``tokenizer_config.json`` beside it names the special tokens.

    Raises:
        InputError: a line is no token and rank, or a byte or rank is missing.
    """
    ranks = _read_ranks(raw, path)
    letters = _byte_letters()
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (spelt[left], spelt[right])
        for token in sorted(ranks, key=ranks.__getitem__)
        for left, right in _pairs(token, ranks)
    ]
    vocabulary = {spelt[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # In the order of their ids, which count on from the last rank.
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in _special_names(len(ranks), path)])
    return tokenizer.to_str()


def _read_ranks(raw: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise InputError(
                f"--tokenizer={path}:{number}: must be a token in base64 and its rank; copy the file again"
            ) from None
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking or sorted(ranks.values()) != list(range(len(ranks))):
        what = f"has no token for the byte 0x{lacking[0]:02x}" if lacking else "has ranks that do not count up from 0"
        raise InputError(f"--tokenizer={path}: {what}, so it is not whole; copy the file again")
    return ranks


def _pairs(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs whose merging makes a token: one, unless merges of lower rank do not lead to it, then any that may."""
    if len(token) == 1:
        return []
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:])]
        lowest = min(joined)
        if lowest >= ranks[token]:
            cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
            return [(left, right) for left, right in cuts if left in ranks and right in ranks]
        at = joined.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [(parts[0], parts[1])]


def _special_names(first: int, path: Path) -> list[str]:
    """Names of the special tokens, from id ``first`` on.

    Raises:
        InputError: the ``tokenizer_config.json`` is none.
    """
    names = {first: "[BOS]", first + 1: "[EOS]", first + RESERVED - 2: "[UNK]", first + RESERVED - 1: "[PAD]"}
    config = path.with_name("tokenizer_config.json")
    if config.exists():
        with edge(config, remedy="copy it again from where the tokenizer is from"):
            named = json.loads(config.read_bytes())["added_tokens_decoder"]
            names = {int(index): str(entry["content"]) for index, entry in named.items()}
    last = max([first + RESERVED - 1, *names])
    listed = [names.get(index, f"<|reserved_token_{index}|>") for index in range(first, last + 1)]
    if min(names, default=first) < first or len(set(listed)) < len(listed):
        raise InputError(
            f"{config}: names tokens below {first} or one name twice, so it is another tokenizer's; copy the two again"
        )
    return listed


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in byte-level vocabularies: its own if it is printable, else a later one."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + index) for index, byte in enumerate(others)}
