"""Which precision a run computes in: decided once at its start, by what the device is good at.

train.precision    accelerator, CPU with bf16 units    CPU without
auto               bf16                                fp32
bf16               bf16                                bf16, products in fp32 and rounded
"""

import torch

from model.widen import has_bf16_units

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def resolve_precision(precision: str, device: torch.device) -> str:
    """A key of `DTYPES`; only "auto" depends on ``device``. Anything else is returned as it is."""
    if precision != "auto":
        return precision
    return "bf16" if has_bf16_units(device) else "fp32"


def describe_precision(precision: str, device: torch.device) -> str:
    """A resolved precision for the heading, and what a CPU without bf16 units means for it."""
    if precision == "fp64" or has_bf16_units(device):
        return precision
    return f"{precision} ({'products in fp32, rounded: ' if precision == 'bf16' else ''}the CPU has no bf16 units)"
