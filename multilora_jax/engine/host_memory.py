"""Memory of this process (host only, no jax)."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from pathlib import Path


def release_freed_memory() -> None:
    """Gives memory that the C allocator holds but nobody uses back to the system, where it is glibc's."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike ru_maxrss it does not count what the parent held before it started this program.
        match = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if match:
            return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
