"""Kimi's tokenizer file gives the ids that tiktoken gives, for any text."""

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from data.store import TokenStore
from data.tiktoken_file import PATTERN, tokenizer_of_ranks
from data.tokenize import tokenize
from data.tokenizer import load_tokenizer, read_tokenizer, vocab_size_of
from tests.data.test_tokenize import lines, options, texts_of

TEXT = """def forward(self, x_BTD: Tensor) -> Tensor:\n    return self.norm(x_BTD) * 1234567.890\r\n
It's what we'LL do: DON'T stop; they've said I'd — naïveté, Größe, ÉTÉ.   Trailing   \t\n\n\n  spaces
混合测试 Mixed English 1234567890 北京市 Pascal、中文English混合。日本語のテキストです 한국어 नमस्ते 🌍🌎🌏 x² ½ Ⅳ 〇々
"""


def make_ranks() -> dict[bytes, int]:
    """A small byte-level vocabulary as tiktoken has it: bytes, then merges by rank."""
    words = sorted({TEXT[start:stop] for start in range(len(TEXT)) for stop in range(start + 2, start + 6)})
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 600:
        # The pair that the words have most often in two tokens becomes the next token.
        pairs: dict[bytes, int] = {}
        for word in words:
            parts = merged(word.encode(), ranks)
            for left, right in zip(parts, parts[1:]):
                pairs[left + right] = pairs.get(left + right, 0) + 1
        for token in sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:20]:
            ranks.setdefault(token, len(ranks))
    return ranks


def merged(raw: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Byte-pair encoding as it is defined: the neighbours of lowest rank first."""
    parts = [raw[at : at + 1] for at in range(len(raw))]
    while (joined := [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:])]) and (
        lowest := min(joined)
    ) < len(ranks):
        at = joined.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def write(folder: Path, ranks: Mapping[bytes, int], *, special: Mapping[int, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiktoken.model"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    if special is not None:
        named = {str(index): {"content": name, "special": True} for index, name in special.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    return path


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return make_ranks()


@pytest.fixture(scope="module")
def theirs(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


@pytest.fixture(scope="module")
def ours(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write(tmp_path_factory.mktemp("kimi"), ranks)
    return Tokenizer.from_str(read_tokenizer(str(path)))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_same_ids_for_the_text_of_the_vocabulary(ours: Tokenizer, theirs: tiktoken.Encoding) -> None:
    expected = theirs.encode(TEXT, disallowed_special=())
    assert ids(ours, TEXT) == expected
    assert len(expected) < 0.7 * len(TEXT.encode())
    assert ours.decode(expected) == TEXT


ODD = "\x85\xa0\u200b\u017f\u212a\u0130\xdf\u01c5"
"""Spaces of other kinds, and letters whose cases are more than two."""


@given(
    text=st.one_of(
        st.text(max_size=60),
        st.text(st.sampled_from([*sorted(set(TEXT)), *ODD]), max_size=60),
        st.text(st.sampled_from("aA'sStTlLrR 1\n\t"), max_size=40),
    )
)
@settings(max_examples=400, deadline=None)
def test_same_ids_for_any_text(ours: Tokenizer, theirs: tiktoken.Encoding, text: str) -> None:
    assert ids(ours, text) == theirs.encode(text, disallowed_special=())
    assert ours.decode(ids(ours, text)) == text


def test_same_ids_around_every_character(ours: Tokenizer, theirs: tiktoken.Encoding) -> None:
    """Each class of the pattern has the same members in both libraries: a sample of all, and all of the first plane."""
    points = [*range(0x3000), *range(0x3000, sys.maxunicode + 1, 37)]
    for point in points:
        if 0xD800 <= point < 0xE000:
            continue
        letter = chr(point)
        text = f"a{letter}b {letter}{letter}  '{letter}1{letter}"
        assert ids(ours, text) == theirs.encode(text, disallowed_special=()), hex(point)


def test_a_token_that_merges_do_not_lead_to() -> None:
    """Its ranks are not those of any training: b"abc" has no pair of lower rank; tiktoken makes it when it is all."""
    table = {bytes([byte]): byte for byte in range(256)} | {b"abcd": 256, b"bc": 257, b"abc": 258, b"cd": 259}
    theirs = tiktoken.Encoding("odd", pat_str=PATTERN, mergeable_ranks=table, special_tokens={})
    raw = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in table.items())
    ours = Tokenizer.from_str(tokenizer_of_ranks(raw, path=Path("nowhere/tiktoken.model")))
    for text in ("abcd", "abc", "xabcd", "abcdabc", "bcd", "aabcd"):
        assert ids(ours, text) == theirs.encode(text), text


class TestSpecialTokens:
    def test_without_names(self, ranks: dict[bytes, int], ours: Tokenizer) -> None:
        first = len(ranks)
        assert vocab_size_of(ours) == first + 256
        for name, index in (("[BOS]", 0), ("[EOS]", 1), (f"<|reserved_token_{first + 7}|>", 7), ("[PAD]", 255)):
            assert ours.token_to_id(name) == first + index

    def test_named_by_the_file_beside_it(self, tmp_path: Path, ranks: dict[bytes, int]) -> None:
        first = len(ranks)
        special = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>", first + 300: "<think>"}
        made = Tokenizer.from_str(read_tokenizer(str(write(tmp_path, ranks, special=special).parent)))
        assert {index: made.id_to_token(index) for index in special} == special
        assert made.id_to_token(first + 299) == f"<|reserved_token_{first + 299}|>"
        assert vocab_size_of(made) == first + 301

    @pytest.mark.parametrize("special", [{5: "[BOS]"}, {10_000: "[EOS]", 10_001: "[EOS]"}], ids=["below", "twice"])
    def test_of_another_tokenizer(self, tmp_path: Path, ranks: dict[bytes, int], special: dict[int, str]) -> None:
        with pytest.raises(ValueError, match=r"tokenizer_config.json: names tokens below .* copy the two again"):
            read_tokenizer(str(write(tmp_path, ranks, special=special)))

    def test_a_damaged_file_beside_it(self, tmp_path: Path, ranks: dict[bytes, int]) -> None:
        path = write(tmp_path, ranks)
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer_config.json: cannot be read"):
            read_tokenizer(str(path))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda raw: raw + b"no token here\n", r"tiktoken.model:\d+: must be a token in base64 and its rank"),
        (
            lambda raw: raw[len(raw) // 2 :].split(b"\n", 1)[1],
            r"tiktoken.model: has (no token for the byte|ranks that)",
        ),
        (lambda raw: raw.rsplit(b"\n", 3)[0] + b"\nAAAAAA== 9999\n", r"tiktoken.model: has ranks that do not count up"),
    ],
    ids=["line", "half", "gap"],
)
def test_damaged(tmp_path: Path, ranks: dict[bytes, int], change: object, problem: str) -> None:
    path = write(tmp_path, ranks)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=problem):
        read_tokenizer(str(path))


def test_a_corpus_made_with_it(tmp_path: Path, ranks: dict[bytes, int], theirs: tiktoken.Encoding) -> None:
    """Documents end with [EOS]; the corpus has a tokenizer.json, which decodes and serves further sources."""
    path = write(tmp_path / "kimi", ranks)
    source = lines(tmp_path / "in.jsonl", {"text": TEXT}, {"text": "[EOS] is text here"})
    manifest = tokenize(options(source, tokenizer=path), tmp_path / "out")
    store = TokenStore.open(tmp_path / "out")
    assert store.document(0).tolist() == [*theirs.encode(TEXT, disallowed_special=()), len(ranks) + 1]
    assert (manifest.vocab_size, manifest.eos_id) == (len(ranks) + 256, len(ranks) + 1)
    assert texts_of(tmp_path / "out") == [TEXT, "[EOS] is text here"]
    again = tokenize(options(source, tokenizer=store.tokenizer_file), tmp_path / "again")
    assert again.content_hash == manifest.content_hash
    assert load_tokenizer(store.tokenizer_file).get_vocab_size() == len(ranks) + 256
