"""Memory of this process (host only, no jax)."""

from __future__ import annotations

import ctypes
import os
import sys


def release_freed_memory() -> None:
    """Gives memory that the C allocator holds but nobody uses back to the system, where it is glibc's."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
