"""Plans as text."""

from __future__ import annotations

from collections import Counter

from multilora_jax.plan.arithmetic import Plan, Sizes
from multilora_jax.plan.collectives import total_sent
from multilora_jax.plan.compiled import CompiledStep


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3f} GB"


def plan_text(name: str, plan: Plan, sizes: Sizes, tp: int, dtype: str, memory_gb: float | None) -> str:
    """The arithmetic plan, a line for each part."""
    rows = f"buffers of {sizes.max_rank_rows} and of {sizes.next_rank_rows} rows"
    if plan.in_place:
        rows = f"{sizes.max_rank_rows} rows read in place, by a table of where they lie"
    lines = [
        f"{name} in {dtype} on {tp} device{'s' * (tp > 1)}; GB (10^9 bytes) on each",
        f"  weights      {_gb(plan.weights)}",
        f"  pool         {_gb(plan.pool)}: {plan.num_pages} pages of {plan.page_bytes / 2**20:.2f} MiB on all devices",
        f"  rank rows    {_gb(plan.rows)}: {rows}",
        f"  temporaries  {_gb(plan.temporaries)}: steps of up to {sizes.num_tokens} tokens",
        f"  peak         {_gb(plan.peak)}",
    ]
    if memory_gb is not None:
        fits = "fits" if plan.peak <= memory_gb * 1e9 else "does NOT fit"
        lines[-1] += f", {fits} in {memory_gb:g} GB"
    if plan.num_adapters:
        lines.append(f"  {plan.num_adapters} adapters take {plan.num_adapters * plan.adapter_pages} pages together")
    if plan.kv_tokens >= 0:
        lines.append(f"  which leaves pages for {plan.kv_tokens} tokens")
    else:
        lines.append("  which are MORE than the pool has: fewer adapters, or more memory")
    for e in plan.exchanges:
        lines.append(
            f"  {e.what}: {e.count} all-reduces of {e.nbytes} bytes in a step of {sizes.max_num_seqs} decodes, "
            f"of which each device sends {_gb(e.sent)}"
        )
    return "\n".join(lines)


def step_text(step: CompiledStep, plan: Plan, next_rows: int, tp: int) -> str:
    """The compiled step beside the plan."""
    lines = ["compiled for the mesh; bytes on each device"]
    for program in step.programs:
        lines.append(
            f"  {program.name:7} x {program.runs}: arguments {program.arguments}, outputs {program.outputs} (in place "
            f"{program.aliased}), temporaries {program.temporaries}"
        )
        kinds = Counter((c.kind, c.shapes, c.nbytes) for c in program.collectives)
        lines += [
            f"    {count} x {kind} of {shapes}, {nbytes} bytes" for (kind, shapes, nbytes), count in kinds.items()
        ]
    sent = sum(program.runs * total_sent(program.collectives, tp) for program in step.programs)
    peak = step.peak + next_rows
    lines += [
        f"  each device sends {_gb(sent)} a step",
        f"  peak {_gb(peak)}; by arithmetic {_gb(plan.peak)}, {100 * (plan.peak / peak - 1):+.2f} %",
    ]
    return "\n".join(lines)
