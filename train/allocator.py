"""Freed memory stays with the process: on a CPU the first touch of a page costs more than what is done with it.

The C library hands freed blocks of 32 MiB and more back to the system, and the top of its heap whenever that grows
large; every step then takes the same pages anew, each zeroed by the kernel: 0.4 ms a MiB, a sixth of an expert
layer's forward and backward. The price is that the process keeps its largest size.
"""

import ctypes
import sys

# Parameters of mallopt(3); both take a C int.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**30


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of up to 1 GiB for the next allocation; False where that is not possible.

    Affects the whole process and what it allocates from now on: for the start of a program, not for a library.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
