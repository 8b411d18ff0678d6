"""The table of registers and shared memory that kernels may use, `gpu_limits.csv` beside the cases.

A limit is what was seen rounded up to what the hardware hands out (8 registers a thread, 1 KiB of shared memory), the
largest over the versions of jax that it was recorded with.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FIELDS = ("case", "kernel", "registers", "shared_bytes")
_REGISTERS, _SHARED = 8, 1024


def shared_bytes(found: Mapping[str, Any]) -> int:
    """Shared memory of a kernel, static and dynamic."""
    return found.get("shared", 0) + found.get("dynamic_smem", 0)


@dataclass(frozen=True)
class Limit:
    """Most registers of a thread and most shared memory of a block, in bytes."""

    registers: int
    shared_bytes: int

    @classmethod
    def around(cls, found: Mapping[str, Any]) -> Limit:
        """The limit that a kernel as it was seen sets."""
        registers, shared = -(-found["registers"] // _REGISTERS), -(-shared_bytes(found) // _SHARED)
        return cls(registers * _REGISTERS, shared * _SHARED)

    def union(self, other: Limit) -> Limit:
        """The larger of each."""
        return Limit(max(self.registers, other.registers), max(self.shared_bytes, other.shared_bytes))

    @staticmethod
    def exceeded(
        case: str, kernel: str, found: Mapping[str, Any], limits: Mapping[tuple[str, str], Limit]
    ) -> list[str]:
        """What a kernel uses beyond its limit, as readable lines."""
        if "registers" not in found:
            return []
        limit = limits.get((case, kernel))
        if limit is None:
            return [f"{kernel}: no limit is recorded for this case: run with --record"]
        used = Limit(found["registers"], shared_bytes(found))
        lines = []
        if used.registers > limit.registers:
            lines.append(f"{kernel}: {used.registers} registers, more than {limit.registers}")
        if used.shared_bytes > limit.shared_bytes:
            lines.append(f"{kernel}: {used.shared_bytes} bytes of shared memory, more than {limit.shared_bytes}")
        return lines


def read(path: Path) -> dict[tuple[str, str], Limit]:
    """The limits by (case, kernel); none where there is no file."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["case"], row["kernel"]): Limit(int(row["registers"]), int(row["shared_bytes"])) for row in rows}


def write(path: Path, limits: Mapping[tuple[str, str], Limit], cases: Iterable[str]) -> None:
    """Writes the limits of the cases that still exist, sorted."""
    known = set(cases)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_FIELDS)
        for (case, kernel), limit in sorted(limits.items()):
            if case in known:
                writer.writerow((case, kernel, limit.registers, limit.shared_bytes))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows with the same keys as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
