"""Expert parallel: who computes which rows, how they get there, and whose weights go along.

planner.py       plans from counts: every expert at home, or equal rows on every rank; `planner_reference` is the law
dispatch.py      tokens to their experts' ranks and back
deduplicate.py   the same with one payload for each token and rank
weights.py       copies of hot experts, and their gradients home
trace.py         recorded loads
"""

from functools import partial

from model.kimi import KimiModel
from model.moe import MoE
from parallel.expert.config import ExpertsConfig
from parallel.expert.deduplicate import DeduplicatingDispatcher
from parallel.expert.dispatch import AllToAllDispatcher
from parallel.expert.planner import plan, plan_home
from parallel.mesh import Axis


def install_experts(model: KimiModel, *, axis: Axis, config: ExpertsConfig) -> None:
    """Give every expert layer of ``model``, whose experts are this rank's slice, the exchange over ``axis``.

    Nothing changes on an axis of size 1.
    """
    if axis.size == 1:
        return
    balanced = config.dispatcher == "balanced"
    make_plan = partial(plan, above=config.balance_above) if balanced else plan_home
    kind = DeduplicatingDispatcher if config.deduplicate else AllToAllDispatcher
    for module in model.modules():
        if isinstance(module, MoE):
            module.dispatcher = kind(axis, experts=model.config.moe.experts, make_plan=make_plan)
