"""What crosses a stage boundary: messages between ranks, and the bank rows that a rank keeps meanwhile.

A forward message is the prefix and the rows that the receiver lacks; a backward message is the gradients of exactly
these, along the same edge. Each is one tensor [1 + rows, B, T, D]:

    rank 0   stage 0 ---- prefix, row 0 ---->  rank 1   stage 1 ---- prefix ---->  rank 0   stage 2   (has row 0)
                     <--- their gradients ---                   <-- its gradient --
    gradient of row 0 on rank 0 = that of stage 2 (kept until then) + that of stage 1 (came with the edge)

Both ends derive shapes and order from the layout and the schedule, so nothing is negotiated. Sends are asynchronous,
and receives are posted in the order in which the other rank sends, so that messages pair up on NCCL too, which knows no
tags; messages to lower ranks have a communicator of their own (`parallel.mesh`). A rank hence waits only for what its
next action needs, which is what the schedule's simulation assumes: a schedule without a deadlock has none here.
"""

from collections import Counter, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from model.precision import compute_dtype
from parallel.collectives import receive_start, send_start
from parallel.mesh import Axis, Mesh
from parallel.pipeline.layout import PipelineLayout
from parallel.pipeline.schedule import Action, Schedule, arrivals, receiver


class BankRows:
    """The bank rows of one microbatch that the stages of one rank share, and the gradients that return to them.

    Args:
        label: names the rank and microbatch in failures.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._rows: dict[int, tuple[Tensor, int]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._dtype = torch.float32

    def put(self, row: int, value: Tensor) -> None:
        """Keep a row that arrived or was closed here."""
        assert row not in self._rows, f"{self.label}: row {row} came twice"
        self._rows[row] = value.detach(), value._version

    def get(self, row: int) -> Tensor:
        """A row, outside any graph."""
        assert row in self._rows, f"{self.label}: row {row} is missing"
        value, version = self._rows[row]
        assert value._version == version, f"{self.label}: row {row} was changed in place, it is stale"
        return value

    def release(self) -> None:
        """Let go of the rows: no later stage of the rank reads them. Their gradients are still to come."""
        self._rows.clear()

    def add_gradient(self, row: int, gradient: Tensor | None) -> None:
        """Add up a row's gradients, in the order of the calls, which is that of the action list."""
        assert gradient is not None, f"{self.label}: a stage that read row {row} has no gradient for it"
        present = self._gradients.get(row)
        # In fp32 at least, as soon as there is something to add.
        self._gradients[row] = gradient if present is None else present.to(compute_dtype(gradient.dtype)) + gradient
        self._dtype = gradient.dtype

    def take_gradient(self, row: int) -> Tensor:
        """The whole gradient of a row, to leave the way the row came; it is complete and gone then."""
        assert row in self._gradients, f"{self.label}: no gradient of row {row} has come"
        return self._gradients.pop(row).to(self._dtype)

    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._rows and not self._gradients


class Mail:
    """The messages of one run of a schedule, on one rank. A stage on the same rank gets its message without a copy.

    Args:
        layout, schedule: say who sends what to whom, in which order.
        mesh: for its pp axes.
        shapes: [B, T, D] of the state of each microbatch on this rank (and its counterparts).
        dtype, device: of the state.
        sent: takes the bytes that this rank sends over each hop, by (stage, next stage); gradients go the other way.
    """

    def __init__(
        self,
        layout: PipelineLayout,
        schedule: Schedule,
        *,
        mesh: Mesh,
        shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        sent: Counter[tuple[int, int]],
    ) -> None:
        self.sent = sent
        self.layout, self.mesh, self.rank = layout, mesh, mesh.pp.rank
        self.shapes, self.dtype, self.device = shapes, dtype, device
        self._due = {
            source: deque(actions) for source, actions in arrivals(schedule, layout, rank=mesh.pp.rank).items()
        }
        self._posted: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._local: dict[Action, list[Tensor]] = {}
        self._sends: list[tuple[dist.Work, Tensor]] = []

    def send(self, action: Action, slices: list[Tensor]) -> None:
        """Send what ``action`` made: the prefix and rows for the next stage, or their gradients for the one before."""
        stage = receiver(action, self.layout)
        assert stage is not None, f"nobody waits for {action}"
        assert len(slices) == self._slices(action), f"{action} sends {len(slices)} slices, not {self._slices(action)}"
        target = self.layout.rank_of(stage)
        if target == self.rank:
            self._local[action] = slices
            return
        message = torch.stack(slices)
        expected = (len(slices), *self.shapes[action.microbatch]), self.dtype
        assert (message.shape, message.dtype) == expected, f"{action}: {message.shape} {message.dtype}, not {expected}"
        work = send_start(message, self._axis(self.rank, target), target=target, name="pp send")
        self.sent[action.stage, stage] += message.nbytes
        # The buffer must live until it has left. gloo tells so only when waited for.
        self._sends = [(w, buffer) for w, buffer in self._sends if not w.is_completed()]
        self._sends.append((work, message))

    def receive(self, action: Action) -> list[Tensor]:
        """What ``action``, on any rank, sent to a stage of this rank. Waits for it."""
        source = self.layout.rank_of(action.stage)
        if source == self.rank:
            assert action in self._local, f"{action} has sent nothing"
            return self._local.pop(action)
        while action not in self._posted:
            self._post(source)
        if self._due[source]:
            # One ahead, so that it can arrive while this one is worked on.
            self._post(source)
        work, message = self._posted.pop(action)
        work.wait()
        return list(message.unbind())

    def close(self) -> None:
        """Wait until everything has left."""
        unread = [*self._local, *self._posted, *(action for due in self._due.values() for action in due)]
        assert not unread, f"messages were not read: {unread}"
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _post(self, source: int) -> None:
        action = self._due[source].popleft()
        shape = (self._slices(action), *self.shapes[action.microbatch])
        message = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._posted[action] = receive_start(message, self._axis(source, self.rank), source=source), message

    def _axis(self, source: int, target: int) -> Axis:
        return self.mesh.pp if source < target else self.mesh.pp_back

    def _slices(self, action: Action) -> int:
        """Prefix and rows of an action's message; the gradients are those of the message that came in."""
        return 1 + len(self.layout.arriving(action.stage + 1 if action.kind == "F" else action.stage))
