"""Documents: where the documents of a batch begin, computed once and handed to every layer.

A batch is either [B, T] rows of one document each, or one row of T tokens that packs several documents
(``cu_seqlens``). Attention, KDA's state and its convolutions all stop at these boundaries.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.kernels.kda_plan import Plans


@dataclass(frozen=True)
class Documents:
    """Boundaries of the documents in a [B, T] batch.

    cu_seqlens: int64 [N + 1] on the host, offsets into the T tokens of the one row; None: every row is one
        document.
    position_BT: int64 [B, T], each token's position inside its own document.
    kda_plans: index plans that KDA makes of the boundaries, for all layers; `dataclasses.replace` begins without any.
    """

    cu_seqlens: Tensor | None
    position_BT: Tensor
    kda_plans: Plans = field(init=False, default_factory=Plans, compare=False, repr=False)

    @classmethod
    def of(cls, batch: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> "Documents":
        """Describe a [batch, length] input. Empty documents are dropped.

        Raises:
            ValueError: ``cu_seqlens`` with more than one row, not starting at 0, not ending at ``length``
                or decreasing.
        """
        if cu_seqlens is None:
            return cls(None, torch.arange(length, device=device).expand(batch, length))
        offsets = cu_seqlens.to("cpu", torch.int64)
        if batch != 1:
            raise ValueError(
                f"cu_seqlens with {batch} rows: packed documents need one row; flatten input_ids to [1, B*T]"
            )
        if offsets.dim() != 1 or offsets[0] != 0 or offsets[-1] != length or bool((offsets.diff() < 0).any()):
            raise ValueError(f"cu_seqlens={offsets.tolist()}: must rise from 0 to the number of tokens, {length}")
        offsets = torch.unique_consecutive(offsets)
        starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
        return cls(offsets, (torch.arange(length) - starts).unsqueeze(0).to(device))

    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of every document along T; one span over all of T where rows are documents."""
        if self.cu_seqlens is None:
            return [(0, self.position_BT.shape[1])]
        offsets: list[int] = self.cu_seqlens.tolist()
        return list(zip(offsets[:-1], offsets[1:]))
