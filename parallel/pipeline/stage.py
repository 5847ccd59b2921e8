"""A pipeline rank's part of the model: the same `KimiModel`, with `Absent` wherever another rank holds the module.

Names stay those of the whole model (``layers.5.mixer.q.weight``), so initialisation, checkpoints and optimizer groups
need to know nothing of stages.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from model.kimi import Block, KimiModel
from parallel.mesh import Axis, Mesh
from parallel.pipeline.layout import PipelineLayout


class Absent(nn.Module):
    """Stands for a module that another pipeline rank holds: no parameters, and running it is a mistake."""

    def forward(self, *args: Any) -> Any:
        raise AssertionError("this module is on another pipeline rank")


def keep_part(model: KimiModel, layers: Collection[int], *, first: bool, last: bool) -> None:
    """Leave in ``model`` only what this pipeline rank runs, in place; call it while the model is on the meta device.

    Args:
        layers: indices of the layers to keep.
        first: keep the embedding too.
        last: keep the output mix, norm and head too.
    """
    for index in range(len(model.layers)):
        if index not in layers:
            model.layers[index] = Absent()
    # A tied head keeps the embedding beside it, for its name, which is the embedding's.
    gone = [] if first or (last and model.config.tie_embeddings) else ["embed"]
    gone += [] if last else ["output_mix", "norm", "head"]
    for name in gone:
        if getattr(model, name) is not None:
            setattr(model, name, Absent())


def parameter_stages(model: KimiModel, layout: PipelineLayout) -> dict[str, int]:
    """Virtual stage of every parameter that ``model`` holds, in the order of ``named_parameters``.

    Of a parameter that two of them use (a tied head), the one whose backward comes last.
    """
    embeds = 0 in held_layers(model)
    stage_of = {layer: stage for stage in range(layout.stages) for layer in layout.layers(stage)}
    stages = {}
    for name, _ in model.named_parameters():
        module, _, rest = name.partition(".")
        if module == "layers":
            stages[name] = stage_of[int(rest.partition(".")[0])]
        else:
            stages[name] = 0 if module == "embed" and embeds else layout.last
    return stages


def tied_to(model: KimiModel, *, mesh: Mesh) -> Axis | None:
    """The two ranks that share a tied embedding, if this rank is one of them and its head's use is another's affair.

    A rank that holds both ends of the pipeline (there is one stage, or they lie in a V) has nothing to share.
    """
    if not model.config.tie_embeddings or mesh.ends.size == 1:
        return None
    has_head = not isinstance(model.head, Absent)
    return mesh.ends if has_head == (mesh.ends.rank == 1) else None


def held_layers(model: KimiModel) -> tuple[int, ...]:
    """Indices of the layers that this rank holds."""
    return tuple(index for index, layer in enumerate(model.layers) if isinstance(layer, Block))
