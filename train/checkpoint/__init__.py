"""Checkpoints: what one contains, how it is written and found again, and how it lies on the disk.

contents.py    which tensors of a run are saved, and how a run continues from them
store.py       the store: save, check, latest, load
files.py       tensors in the files of `torch.distributed.checkpoint`, checksummed as they pass
verify.py      which checkpoint is whole; the hashing is dealt out over the ranks
agreement.py   a phase succeeds on all ranks or fails on all
staging.py     folders: staged, sealed, published, pruned
"""

from train.checkpoint.config import CheckpointConfig
from train.checkpoint.staging import CheckpointError
from train.checkpoint.store import CheckpointStore, SavedTensor

__all__ = ["CheckpointConfig", "CheckpointError", "CheckpointStore", "SavedTensor"]
