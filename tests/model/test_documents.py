"""Documents: what all layers share of a batch, and what does not outlive it."""

from dataclasses import replace

import pytest
import torch

from model.documents import Documents
from model.kernels import kda_plan
from parallel.context.layout import slice_tokens
from parallel.mesh import Axis
from tests.model.tiny import tiny_model, tokens

CPU = torch.device("cpu")


def test_all_layers_of_a_pass_share_one_index_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = kda_plan.make_plan
    monkeypatch.setattr(kda_plan, "make_plan", lambda *args, **options: made.append(args) or original(*args, **options))
    model = tiny_model()
    model(tokens(1, 12), torch.tensor([0, 5, 12])).sum().backward()
    assert model.config.mixers.count("K") > 1
    assert made == [((0, 5, 12),)]


def test_documents_are_copied_without_the_plans_that_were_made_of_them() -> None:
    documents = Documents.of(1, 12, torch.tensor([0, 5, 12]), CPU)
    documents.kda_plans.get((0, 5, 12), heads=2, device=CPU)
    copy = replace(documents)
    assert copy.kda_plans is not documents.kda_plans
    assert torch.equal(copy.position_BT, documents.position_BT)


def test_documents_of_a_slice_are_copied_as_such() -> None:
    ids = tokens(1, 12)
    documents = slice_tokens(ids, ids, torch.tensor([0, 5, 12]), axis=Axis("cp", None, 1, 2)).documents
    copy = replace(documents)
    assert type(copy) is type(documents)
    assert vars(copy) | {"kda_plans": None} == vars(documents) | {"kda_plans": None}
