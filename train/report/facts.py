"""What the report says of a run besides its curves: its beginning, its versions, and how much text a token is."""

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.loader import Loader
from train.run_folder import FACTS_FILE

DOCUMENTS = 64
"""Documents of each source that are looked at for the size of a token."""

TOKENS = 1024
"""Tokens of each, from its beginning."""


def read_facts(run_dir: Path) -> dict[str, Any]:
    """What `facts.json` holds; nothing if it is missing or broken, since the report can do without."""
    try:
        facts = json.loads((run_dir / FACTS_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def run_facts(run_dir: Path) -> dict[str, str]:
    """When the run in this folder began, with its first leg (ISO 8601, UTC), and the versions of the present leg."""
    begun = read_facts(run_dir).get("begun") or datetime.now(UTC).isoformat(timespec="seconds")
    try:
        own = f"perilune {version('perilune')}, "
    except PackageNotFoundError:
        own = ""
    return {"begun": begun, "versions": f"{own}torch {torch.__version__}, Python {platform.python_version()}"}


def bytes_per_token(loader: Loader) -> float | None:
    """UTF-8 bytes of text that a token stands for, on average over the blend; from documents spread over each source.

    A document's end costs a token and stands for no text, as in the loss. None if the tokenizer cannot be read.
    """
    try:
        loader.tokenizer()
    except Exception:  # the library raises plain Exception
        return None
    blend = sum(source.weight for source in loader.sources)
    found = 0.0
    for source in loader.sources:
        chosen = np.unique(np.linspace(0, source.store.num_documents - 1, DOCUMENTS).astype(np.int64))
        documents = [source.store.read(int(index), 0, TOKENS) for index in chosen]
        text = sum(len(loader.decode(document.tolist()).encode()) for document in documents)
        found += source.weight / blend * text / sum(map(len, documents))
    return found
