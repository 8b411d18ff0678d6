"""Programs on a mesh of four virtual devices, as JSON: XLA_FLAGS=... python -m tests.plan.mesh_worker PART

PART is a key of PARTS: the types, ranks and numbers of adapters of which one layer's collectives are read.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from multilora_jax.engine.batch import BatchShape
from multilora_jax.lora.layout import Reach
from multilora_jax.memory.geometry import MODULES
from multilora_jax.plan.arithmetic import exchanges
from multilora_jax.plan.collectives import read_collectives
from multilora_jax.plan.compiled import compile_step
from multilora_jax.plan.layer_table import ADAPTERS, RANKS, layer_collectives, table_text
from multilora_jax.plan.target import StepSizes, nbytes_per_device, target_mesh, target_programs, target_spec
from tests.plan.models import SMALL

TP, T, PAGES = 4, 16, 4096
PARTS = {"quick": (("float32",), (8, 128), (1, 8)), "all": (("float32", "bfloat16"), RANKS, ADAPTERS)}


def programs_in_place() -> dict[str, Any]:
    """Bytes of programs over a pool of half a gigabyte, on each device."""
    mesh, spec = target_mesh("cpu", TP), target_spec("cpu", SMALL, PAGES, TP, "float32")
    programs, shapes, _ = target_programs(spec, mesh, StepSizes(T, 64, 512, 64))
    facts: dict[str, Any] = {
        "pool": PAGES * spec.geometry.page_bytes // TP, "page": spec.geometry.page_bytes // TP,
        "rows": nbytes_per_device(programs._row_buffers(64)),
    }  # fmt: skip
    for name, key in (
        ("layers", ("layers", shapes[-1], 64, Reach.PROJECTIONS)),
        ("write_page", ("write_page",)),
        ("insert", ("insert", 64, MODULES)),
    ):
        compiled = programs.get(*key)
        memory = compiled.memory_analysis()
        facts[name] = {
            "arguments": memory.argument_size_in_bytes, "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes, "collectives": len(read_collectives(compiled.as_text())),
        }  # fmt: skip
    step = compile_step(programs, BatchShape(0, 0, T), 64)
    facts["step"] = [(p.name, p.runs, [asdict(c) for c in p.collectives]) for p in step.programs]
    facts["planned"] = [asdict(e) for e in exchanges(SMALL, spec.geometry, T, 64)]
    return facts


def main() -> None:
    result: dict[str, Any] = {"in_place": programs_in_place()}
    dtypes, ranks, adapters = PARTS[sys.argv[1]]
    for dtype in dtypes:
        mesh, spec = target_mesh("cpu", TP), target_spec("cpu", SMALL, 64, TP, dtype)
        rows = layer_collectives("cpu", mesh, spec, T, ranks, adapters)
        result[dtype] = [asdict(row) for row in rows]
        result[f"{dtype} table"] = table_text(rows, T, TP)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
