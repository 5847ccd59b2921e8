"""Facts of a run: the size of a token is that of the text, and the beginning is that of the first leg."""

import json
from pathlib import Path

import pytest

from data.loader import Loader, Source, open_sources
from data.store import TokenStore
from data.tokenizer import EOS, load_tokenizer
from tests.data.corpora import byte_tokenizer, write_corpus
from tests.launch.tiny_run import make_corpus
from train.report.facts import bytes_per_token, read_facts, run_facts


def open_corpus(folder: Path, texts: list[str], *, weight: float = 1.0) -> Source:
    """Each text a document of single bytes and an end."""
    path = byte_tokenizer(folder)
    tokenizer = load_tokenizer(path)
    eos = tokenizer.token_to_id(EOS)
    documents = [[*tokenizer.encode(text).ids, eos] for text in texts]
    store = write_corpus(folder, [documents], vocab_size=259, tokenizer=path.read_text())
    return open_sources([store], weights=[weight], fraction=0.0, seed=0)[0]


def test_a_token_of_a_byte_is_a_byte_but_for_the_ends(tmp_path: Path) -> None:
    """Letters of several bytes are several tokens; the end of a document is a token without text."""
    loader = Loader([open_corpus(tmp_path, ["abc", "gr\u00fc\u00dfe", "\u4f60\u597d"])], seed=0)
    assert bytes_per_token(loader) == (3 + 7 + 6) / (4 + 8 + 7)


def test_sources_count_by_their_weight(tmp_path: Path) -> None:
    sources = [open_corpus(tmp_path / "a", ["abc"], weight=3.0), open_corpus(tmp_path / "b", ["a"], weight=1.0)]
    assert bytes_per_token(Loader(sources, seed=0)) == pytest.approx(0.75 * 3 / 4 + 0.25 * 1 / 2, rel=1e-12)


def test_a_sample_of_a_large_corpus_is_near_the_whole(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    source = open_sources([TokenStore.open(corpus)], weights=[1.0], fraction=0.0, seed=0)[0]
    text = sum(path.stat().st_size for path in (tmp_path / "library").iterdir())
    whole = text / source.store.manifest.tokens
    assert bytes_per_token(Loader([source], seed=0)) == pytest.approx(whole, rel=0.05)
    assert whole > 1.5


def test_without_a_tokenizer_nothing_is_known(tmp_path: Path) -> None:
    store = write_corpus(tmp_path, [[[1, 2, 3]]])
    loader = Loader([open_sources([store], weights=[1.0], fraction=0.0, seed=0)[0]], seed=0)
    assert bytes_per_token(loader) is None


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_facts_that_are_none_are_left_out(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "facts.json").write_text(content)
    assert read_facts(tmp_path) == {}


def test_a_resumed_run_began_when_its_first_leg_did(tmp_path: Path) -> None:
    first = run_facts(tmp_path)
    assert first["begun"].endswith("+00:00")
    assert "torch 2." in first["versions"]
    (tmp_path / "facts.json").write_text(json.dumps(first | {"begun": "2031-03-05T07:09:11+00:00"}))
    assert run_facts(tmp_path)["begun"] == "2031-03-05T07:09:11+00:00"
