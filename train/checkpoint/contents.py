"""What a checkpoint contains: the tensors and counters of a run, and how a run continues from them."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from data.loader import DataPosition
from model.kimi import KimiModel
from optim.distributed import STATE_KINDS, ShardedOptimizer
from parallel.data import DataParallel
from parallel.grads import EMBEDDING
from parallel.mesh import Mesh
from parallel.pipeline.stage import tied_to
from parallel.sharding import TensorSlice, parameter_specs
from train.checkpoint.store import CheckpointStore


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint, equal on all ranks.

    step: optimizer steps done (skipped ones too).
    tokens: the token clock.
    learning_rate: of the last step; the schedule derives the next one from ``tokens``.
    position: where the data continues.
    data: `data_identity` of what the position is of; empty if a checkpoint from before it was kept was the last.
    shares: of the samples that each of them gives; empty as ``data`` is.
    skipped, skipped_in_a_row: updates that were not made.
    origin: where the first weights came from; empty if they were drawn.
    """

    position: DataPosition
    data: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    step: int = 0
    tokens: int = 0
    learning_rate: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    origin: str = ""

    def advance(self, *, tokens: int, learning_rate: float, position: DataPosition, skipped: bool) -> None:
        """One more step is done."""
        self.step += 1
        self.tokens = tokens
        self.learning_rate = learning_rate
        self.position = position
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def to_state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"position": self.position.to_json()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """Back from `to_state`."""
        position = DataPosition.from_json(state["position"])
        data = {name: tuple(state.get(name, ())) for name in ("data", "shares")}
        return cls(**(state | data | {"position": position}))


def checkpoint_tensors(
    model: KimiModel, *, dp: DataParallel, optimizer: ShardedOptimizer, mesh: Mesh
) -> dict[str, TensorSlice]:
    """What this rank saves, under globally unique names: what it owns; a stage's first rank adds the router biases.

    ``model/<parameter>``, ``model/<buffer>``, ``optim/<state>``, ``rng/<rank>/cpu`` and, where the model is on a GPU,
    ``rng/<rank>/cuda``. Of a tied embedding that two pipeline ranks hold, the first one's.
    """
    params = dict(model.named_parameters())
    tensors = {f"model/{name}": params[name].detach() for name in dp.owned_names}
    if mesh.replicas.rank == 0:
        tensors |= {f"model/{name}": buffer for name, buffer in model.named_buffers()}
    tensors |= {f"optim/{name}": value for name, value in optimizer.state_dict().items()}
    tied = tied_to(model, mesh=mesh)
    if tied is not None and tied.rank > 0:
        again = (f"model/{EMBEDDING}", f"optim/{EMBEDDING}/")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(again)}
    tensors |= {f"rng/{mesh.world.rank}/{kind}": state for kind, state in random_states(model).items()}
    return place_tensors(tensors, model=model, mesh=mesh)


def random_states(model: KimiModel) -> dict[str, torch.Tensor]:
    """State of torch's generators, uint8 [n] on the host: "cpu", and "cuda" of the GPU that the model is on."""
    states = {"cpu": torch.get_rng_state()}
    device = next(model.parameters()).device
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def place_tensors(tensors: dict[str, torch.Tensor], *, model: KimiModel, mesh: Mesh) -> dict[str, TensorSlice]:
    """Each of a checkpoint's tensors with its place in the global one: a parameter and its state lie alike."""
    placed = {name: TensorSlice.whole(tensor) for name, tensor in tensors.items()}
    for name, spec in parameter_specs(model, mesh=mesh).items():
        for key in (f"model/{name}", *(f"optim/{name}/{kind}" for kind in STATE_KINDS)):
            if key in tensors:
                placed[key] = spec.place(tensors[key], mesh)
    return placed


def resume(
    store: CheckpointStore, model: KimiModel, *, dp: DataParallel, optimizer: ShardedOptimizer, mesh: Mesh
) -> Progress | None:
    """Load the newest verified checkpoint, whatever the mesh that saved it; None if there is none.

    A rank, or a GPU, that had no counterpart when saving keeps its random state: `build_run` has seeded it.
    """
    step = store.latest()
    if step is None:
        return None
    wanted = {f"model/{name}": param.detach() for name, param in model.named_parameters()}
    wanted |= {f"model/{name}": buffer for name, buffer in model.named_buffers()}
    optimizer_state = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in optimizer.state_names().items()
    }
    wanted |= {f"optim/{name}": value for name, value in optimizer_state.items()}
    random, names = random_states(model), store.names(step)
    named = {f"rng/{mesh.world.rank}/{kind}": value for kind, value in random.items()}
    wanted |= {name: value for name, value in named.items() if name in names}
    state = store.load(step, tensors=place_tensors(wanted, model=model, mesh=mesh), ignore=("rng/",))
    optimizer.load_state_dict(optimizer_state)
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], next(model.parameters()).device)
    return Progress.from_state(state)
