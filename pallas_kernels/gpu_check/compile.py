"""Compiling one case and collecting what is wrong with it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.gpu_check.case import Case
from pallas_kernels.gpu_check.limits import Limit
from pallas_kernels.gpu_check.reports import collectives, kernel_launches, read_dump
from pallas_kernels.gpu_check.targets import H200

_MEMORY = ("argument", "output", "temp", "alias")


def prepare(folder: Path) -> None:
    """Makes both compilers leave their results in `folder`; call before jax starts its backends."""
    jax.config.update("jax_platforms", "cpu")  # no search for a driver; the topology loads the plugin all the same
    jax.config.update("jax_enable_compilation_cache", False)  # a program out of the cache leaves nothing to read
    flags = f" --xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_emitter_re=ptx"  # ptx: and no other stage's
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)


def _lower(case: Case) -> Any:
    sizes, axes = case.mesh
    num_devices = 1
    for size in sizes:
        num_devices *= size
    topology = topologies.get_topology_desc("", platform="cuda", target_config=H200, topology=f"1x1x{num_devices}")
    mesh = topologies.make_mesh(topology, sizes, axes)
    if case.lower is not None:
        with jax.set_mesh(mesh), dispatch.assume_device(dispatch.H200):
            return case.lower(mesh)
    assert case.fn is not None, "a case has fn or lower"
    specs = case.specs or [PartitionSpec()] * len(case.args)

    def place(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

    args = [
        jax.tree.map(place, spec, arg, is_leaf=lambda x: isinstance(x, PartitionSpec))
        for spec, arg in zip(specs, case.args, strict=True)
    ]
    # From jax 0.11 on Pallas reads the kind of GPU off the ambient mesh.
    with jax.set_mesh(mesh), dispatch.assume_device(dispatch.H200):
        return jax.jit(case.fn, donate_argnums=case.donate).trace(*args).lower()


def _judge(case: Case, compiled: Any, problems: list[str]) -> dict[str, Any]:
    analysis, hlo = compiled.memory_analysis(), compiled.as_text()
    memory = {name: getattr(analysis, f"{name}_size_in_bytes") for name in _MEMORY}
    problems += [f"{want!r} is not in the optimised HLO" for want in case.expect if want not in hlo]
    for pattern in case.forbid:
        problems += [
            f"{pattern!r} matches {line.strip()[:200]}" for line in hlo.splitlines() if re.search(pattern, line)
        ]
    if case.max_temp_bytes is not None and memory["temp"] > case.max_temp_bytes:
        problems.append(f"temporaries of {memory['temp']} bytes, more than {case.max_temp_bytes}")
    if memory["alias"] < case.min_alias_bytes:
        problems.append(f"only {memory['alias']} bytes are aliased, less than {case.min_alias_bytes}")
    calls = sorted(set(re.findall(r'custom_call_target="([^"]+)"', hlo)))
    return {
        "memory": memory, "collectives": collectives(hlo), "custom_calls": calls, "launches": kernel_launches(hlo)
    }  # fmt: skip


def check(
    name: str, case: Case, folder: Path, ptxas: str, limits: Mapping[tuple[str, str], Limit] | None
) -> dict[str, Any]:
    """Compiles a case.

    Args:
        folder: where the compilers dump, see `prepare`.
        limits: by (case, kernel); a kernel that has none is a problem, unless the case is a control. None: no
            kernel is held to any.

    Returns:
        {"kernels", "problems", "memory", "collectives", "custom_calls", "launches", "passed"}.
    """
    problems: list[str] = []
    result: dict[str, Any] = {"problems": problems}
    before = set(os.listdir(folder))
    try:
        compiled = _lower(case).compile()
    except Exception as error:  # whatever a compiler raises is the finding
        lines = str(error).strip().splitlines() or [""]
        problems.append(f"{type(error).__name__}: {lines[0][:400]}")
    else:
        result |= _judge(case, compiled, problems)
    kernels = read_dump(folder, set(os.listdir(folder)) - before, ptxas, problems)
    if not problems and not any("registers" in kernel for kernel in kernels.values()):
        problems.append("no kernel was compiled: the check would be empty")
    own = result.get("launches", {})
    for kernel, found in kernels.items():
        # XLA's own all-reduces spill a few bytes; in a program only Pallas kernels are held to none.
        ours = case.holds(kernel) or re.sub(r"__\d+$", "", kernel) in own
        if ours and found.get("spill_stores", 0) + found.get("spill_loads", 0):
            problems.append(f"{kernel}: spills {found['spill_stores']}/{found['spill_loads']} bytes")
        if case.holds(kernel) and found.get("narrow_loads"):
            problems.append(f"{kernel}: {found['narrow_loads']} loads of 2 bytes: the compiler saw no alignment")
        if limits is not None and case.holds(kernel) and not case.must_fail:
            problems += Limit.exceeded(name, kernel, found, limits)
    control = case.must_fail
    passed = any(re.search(control, problem) for problem in problems) if control else not problems
    return result | {"kernels": kernels, "passed": passed}
