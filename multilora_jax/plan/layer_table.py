"""What one layer's adapters add to the collectives of its base, beside S-LoRA's formula.

S-LoRA (arXiv 2311.03285, section 6) splits the first matrix of q, k and v by rank and gathers its products, and sums
those of o: 3 (N-1) B r / N + 2 (N-1) B r / N elements that each of N devices sends for B tokens. Here every rank row is
split along its long side, whatever the module, so each module's B r projections are summed, 2 (N-1) B r / N each, those
of modules that share an input together. That is 8 where S-LoRA has 5 for the attention, in two collectives where it has
four, and adapters of any rank split alike, ranks that N does not divide too. How many adapters share a step does not
matter: of each token its own rows alone are summed (`pallas_kernels.segmented_lora.own_rows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from multilora_jax.engine.batch import BatchShape
from multilora_jax.engine.own_rows import OwnRows
from multilora_jax.engine.programs import layers_key
from multilora_jax.lora.layout import Reach
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.plan.collectives import Collective, our_formula, read_collectives, slora_formula
from multilora_jax.plan.target import StepSizes, assumed, target_programs

RANKS = (8, 16, 32, 64, 128)
ADAPTERS = (1, 8, 64)

_SLORA_UNITS = {Reach.ATTENTION: 5, Reach.PROJECTIONS: 9}
_MODULES = {Reach.ATTENTION: 4, Reach.PROJECTIONS: 7}


@dataclass(frozen=True)
class LayerCollectives:
    """Of one layer with T tokens of some adapters.

    Attributes:
        rank: r of each, 0 for the base alone.
        adapters: how many of them the step has.
        reach: projections that have rank rows: the attention's or all.
        collectives: the layer's, the base's own among them.
        added: elements that each device sends for the adapters.
        formula: the same by our formula; slora: by S-LoRA's, for all seven modules by its strategy for each.
    """

    rank: int
    adapters: int
    reach: Reach
    collectives: tuple[Collective, ...]
    added: float
    formula: float
    slora: float


def _elements_sent(found: Iterable[Collective], num_devices: int) -> float:
    return sum(c.sent(num_devices) * c.elements / c.nbytes for c in found)


def layer_collectives(
    device: str, mesh: Mesh, spec: LlamaSpec, num_tokens: int, ranks: Sequence[int] = RANKS,
    adapters: Sequence[int] = ADAPTERS,
) -> list[LayerCollectives]:  # fmt: skip
    """Compiles one layer of decodes for the base and for numbers of adapters of each rank, and reads its collectives.

    Args:
        device, mesh, spec: the target, see `target_mesh` and `target_spec`; any number of layers.
        num_tokens: T.
    """
    one, tp = replace(spec.config, num_layers=1), spec.geometry.tp
    spec = replace(spec, config=one, geometry=replace(spec.geometry, num_layers=1), blocks_from=0)
    shape = BatchShape(0, 0, num_tokens)
    reaches = [Reach.ATTENTION, Reach.PROJECTIONS]
    with assumed(device, mesh):

        def read(rank: int, number: int, reach: Reach) -> tuple[Collective, ...]:
            # Rows that are read in place have one table, of the most rows.
            rows = rank * number
            sizes = StepSizes(num_tokens, spec.prefill_block, 4 * spec.geometry.page_tokens, rows)
            programs, _, _ = target_programs(spec, mesh, sizes)
            key = layers_key(shape, rows, reach, rank if rank in OwnRows(rank).sizes(rows) else 0)
            return tuple(read_collectives(programs.get(*key).as_text()))

        base = read(0, 0, Reach.ATTENTION)
        result = [LayerCollectives(0, 0, Reach.ATTENTION, base, 0.0, 0.0, 0.0)]
        for reach, number, rank in itertools.product(reaches, adapters, ranks):
            found = read(rank, number, reach)
            added = _elements_sent(found, tp) - _elements_sent(base, tp)
            ours = our_formula(tp, num_tokens, rank, _MODULES[reach])
            theirs = slora_formula(tp, num_tokens, rank) / 5 * _SLORA_UNITS[reach]
            result.append(LayerCollectives(rank, number, reach, found, added, ours, theirs))
    return result


def table_text(rows: list[LayerCollectives], num_tokens: int, tp: int) -> str:
    """The table that the command prints; elements are those that each device sends in a ring."""
    base = rows[0]
    lines = [
        f"one layer, {num_tokens} tokens, {tp} devices; the base alone: {len(base.collectives)} collectives, "
        f"{_elements_sent(base.collectives, tp):.0f} elements sent, {sum(c.sent(tp) for c in base.collectives):.0f} B",
        "| adapters | on | r | collectives added | elements sent | bytes sent | our formula | S-LoRA's | of the base |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    sent = _elements_sent(base.collectives, tp)
    for row in rows[1:]:
        where = "q k v o" if row.reach is Reach.ATTENTION else "all seven"
        extra = sum(c.sent(tp) for c in row.collectives) - sum(c.sent(tp) for c in base.collectives)
        lines.append(
            f"| {row.adapters} | {where} | {row.rank} | {len(row.collectives) - len(base.collectives)} "
            f"| {row.added:.0f} | {extra:.0f} "
            f"| {row.formula:.0f} | {row.slora:.0f} | {100 * row.added / sent:.2f} % |"
        )
    return "\n".join(lines)
