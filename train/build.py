"""From a validated config to a `Run`: each part of the config goes to one constructor, and no further."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from data.corpus import prepare_default_corpus
from data.loader import DataConfig, DataPosition, Loader, open_loader
from model.config import ModelConfig
from model.kimi import KimiModel
from model.mla import MLA
from model.params import initialize, named_roles
from model.precision import set_precision
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig, make_groups
from optim.qk_clip import QKClipTarget
from parallel.data import DataParallel
from parallel.mesh import Mesh, build_mesh
from train.checkpoint import CheckpointStore
from train.step import Stepper
