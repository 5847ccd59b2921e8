"""Keyed permutations: pure functions of their key, the same in every process and every numpy release.

numpy promises no stable stream for `Generator.permutation`, and a data order that moved with a library update
would break a resumed run. So an index's sort key is a hash that is spelled out here, and the permutation is
the stable sort by it.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

# The constants of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def make_key(*parts: str | int) -> int:
    """A 64-bit key that is a pure function of ``parts`` in their order."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permutation(n: int, *, key: int) -> NDArray[np.int64]:
    """A permutation of ``range(n)``, int64 [n]. Takes about 0.1 s and 24 MB for a million."""
    with np.errstate(over="ignore"):
        bits = np.arange(1, n + 1, dtype=np.uint64) * _GAMMA + np.uint64(key)
        bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
        bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
        bits ^= bits >> np.uint64(31)
    return np.argsort(bits, kind="stable")
