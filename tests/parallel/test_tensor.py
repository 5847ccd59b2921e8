"""What a rank knows of a vocabulary that is cut over tp, without another rank; tests/dist has the rest."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.loss import IGNORE_INDEX
from parallel.mesh import Axis
from parallel.tensor import CutVocabulary

ROWS = 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_label_is_on_the_rank_that_has_its_row(rank: int) -> None:
    """Labels at both ends of both ranks' rows, and none."""
    labels = torch.tensor([[0], [2], [3], [5], [IGNORE_INDEX]])
    row, held = CutVocabulary(Axis("tp", None, rank, 2), rows=ROWS).locate(labels)
    assert held.flatten().tolist() == [rank == 0, rank == 0, rank == 1, rank == 1, False]
    assert row[held].tolist() == [0, 2]
    assert bool(((row >= 0) & (row < ROWS)).all())


def test_normalisers_add_up_as_logarithms_and_targets_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of equal numbers: each normaliser grows by log 2, and each target doubles."""

    def twice(out: Tensor, x: Tensor, *, group: object) -> None:
        out.copy_(torch.cat([x, x]))

    monkeypatch.setattr(dist, "all_gather_single", twice)
    own = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 0.0, 4.0])
    for size in (1, 2):
        normalizers, targets = CutVocabulary(Axis("tp", None, 0, size), rows=ROWS).join(*own)
        torch.testing.assert_close(normalizers, own[0] + torch.tensor(float(size)).log())
        torch.testing.assert_close(targets, size * own[1])
