"""Reading what the compilers leave behind: ptxas messages, dumped kernels, launch tables."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Kernels = dict[str, dict[str, Any]]
"""Kernel name to arch, registers, spill_stores, spill_loads, stack, shared (static), dynamic_smem, grid, threads, and
narrow_loads (of 2 bytes from global memory)."""

_LAUNCH = re.compile(
    r"(?:kKernel|kCustomKernel)\b.*?\s(\S+) grid: (\[[^\]]*\]) threads: (\[[^\]]*\])\s+shared_memory: (\d+)"
)


def find_ptxas() -> str | None:
    """Path of NVIDIA's assembler: of the nvidia-cuda-nvcc wheel, else of the machine."""
    for folder in sys.path:
        if found := sorted(glob.glob(os.path.join(folder, "nvidia", "cu*", "bin", "ptxas"))):
            return found[0]
    return shutil.which("ptxas")


def ptxas_report(text: str) -> Kernels:
    """What `ptxas -v` says of each kernel."""
    kernels: Kernels = {}
    current: dict[str, Any] = {}
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)' for '([^']+)'", line):
            current = kernels.setdefault(match[1], {"arch": match[2]})
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current.update(stack=int(match[1]), spill_stores=int(match[2]), spill_loads=int(match[3]))
        elif match := re.search(r"Used (\d+) registers", line):
            current["registers"] = int(match[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                current["shared"] = int(shared[1])
    return kernels


def _assemble(path: Path, ptxas: str, problems: list[str]) -> Kernels:
    text = path.read_text(errors="replace")
    target = re.search(r"\.target\s+(\w+)", text)
    if target is None:
        return {}  # jax 0.10 also writes empty files
    command = [ptxas, "-v", f"-arch={target[1]}", str(path), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        problems.append("ptxas: " + done.stderr.strip()[:300])
    kernels = ptxas_report(done.stdout + done.stderr)
    for part in re.split(r"^(?=\.visible \.entry|\.entry)", text, flags=re.MULTILINE)[1:]:
        name = re.search(r"\.entry\s+([^\s(]+)", part)
        if name and name[1] in kernels:
            kernels[name[1]]["narrow_loads"] = len(re.findall(r"ld\.global[a-z0-9.:_]*\.[bu]16\b", part))
    return kernels


def read_dump(folder: Path, names: Iterable[str], ptxas: str, problems: list[str]) -> Kernels:
    """The kernels among freshly dumped files.

    Args:
        folder, names: the files.
        problems: what went wrong is added here.
    """
    kernels: Kernels = {}
    shared = 0
    for name in sorted(names):
        path = folder / name
        if name.endswith(".ptxas"):  # Mosaic GPU writes the assembler's messages itself
            kernels.update(ptxas_report(path.read_text(errors="replace")))
        elif name.endswith(".ptx") and name.startswith("module_"):
            for kernel, found in _assemble(path, ptxas, problems).items():
                kernels.setdefault(kernel, {}).update(found)
        elif name.endswith("thunk_sequence.txt"):
            for match in _LAUNCH.finditer(path.read_text()):
                kernels.setdefault(match[1], {}).update(
                    grid=json.loads(match[2]), threads=json.loads(match[3]), dynamic_smem=int(match[4])
                )
        elif name.endswith(".resources.txt") and (found := re.search(r"smem_scratch_bytes=(\d+)", path.read_text())):
            shared = max(shared, int(found[1]))
    if shared:
        for found in kernels.values():
            found.setdefault("dynamic_smem", shared)
    return kernels


def collectives(hlo: str) -> list[str]:
    """Names of the collectives in an optimised HLO."""
    pattern = r" ((?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)[a-z-]*)\("
    return sorted(set(re.findall(pattern, hlo)))


def kernel_launches(hlo: str) -> dict[str, int]:
    """How often an optimised HLO launches each Pallas kernel, by its name."""
    names = re.findall(r'custom-call\(.*op_name="[^"]*?(\w+)/(?:pallas_call|mpmd_map)"', hlo)
    return {name: names.count(name) for name in sorted(set(names))}


def program_row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """A program as a row of a table: MiB a device, Pallas launches, collectives."""
    memory = found["memory"]
    peak = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    sizes = {"arguments": memory["argument"], "aliased": memory["alias"], "temporaries": memory["temp"], "peak": peak}
    row: dict[str, Any] = {"case": name} | {f"{key}_mib": round(value / 2**20, 1) for key, value in sizes.items()}
    launches = " ".join(f"{kernel}:{count}" for kernel, count in found["launches"].items())
    return row | {"pallas_launches": launches, "collectives": " ".join(found["collectives"])}
