"""Rank rows on the device: copied before a step that needs them, or in slices over the steps before it.

The XLA path multiplies by dense buffers of rank rows. Filling them takes longer than using them: a rank-64 adapter of
SmolLM2-135M has 78 MB of rows, as much work as two decode steps of one sequence. So `stage` brings in the rows of
adapters that wait, for a bounded share of each step's time, into free rows, or where the buffers are too small (or
have long been too large) into new ones beside the old; `activate` then finds them there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from multilora_jax.engine.programs import Programs
from multilora_jax.engine.rank_rows import ROW_BLOCK, HostTables, RankRows, RowCopy, RowPlan, num_slots
from multilora_jax.engine.vocab_tables import vocab_tables
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.layout import Reach
from multilora_jax.memory.geometry import MODULES, NUM_ATTENTION, PoolGeometry
from multilora_jax.models.batch import ExtraTables, LayerRows, LoRARows
from multilora_jax.models.rows import attention_rows, unit_columns

PagesOf = Callable[[Adapter], list[int]]

STAGE_SHARE = 0.06
"""Share of a step's time that staging may take; one block of rows is always brought in. The step is the usual one of
decodes, and where the one before read prompts as long as that one: of several prompts that wait for their rows all but
the first would else find each step short of them, one block at a time."""

MOST_STAGE_SHARE = 0.4
"""The same where twice as large a share of the seats stands empty for it: then staging faster is worth slower steps."""

_KEEP = 0.9  # of the moving average of a step's time

ATTENTION = MODULES[:NUM_ATTENTION]
"""Copied alone for the many adapters that have nothing else: two fifths of the work."""


class _Side:
    """One set of buffers: placement on the host, arrays on the device."""

    def __init__(self, rank_rows: RankRows):
        self.rank_rows = rank_rows
        self.layers: list[LayerRows] = []
        self.attention: list[LayerRows] | None = None  # the same without the MLP's, once asked for


class RowBuffers:
    """The buffers of one runner.

    Args:
        geometry: of the pool.
        programs: compiled ones.
        put: places a tree of host arrays on the devices.
        firsts: for each group of layers the index of its first, on the device.
        buckets: sizes in rows, ascending; empty for a runner without adapters.

    Attributes:
        buckets: the sizes.
        tables: what the rows are, without layers and extras; None before the first adapter.
        extra: of extended steps.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        programs: Programs,
        put: Callable[[Any], Any],
        firsts: list[jax.Array],
        buckets: list[int],
    ):
        self.tables: LoRARows | None = None
        self.extra: ExtraTables | None = None
        self.buckets = buckets
        self._geometry = geometry
        self._programs = programs
        self._put = put
        self._firsts = firsts
        self._num_units = max(columns.stop for columns in unit_columns(geometry).values())
        self._now = _Side(RankRows(buckets, geometry.num_layers))
        self._next: _Side | None = None
        self._host = HostTables.empty(geometry.num_layers, 0)
        self._vocab_key: list[Any] = []
        self._copy_s = {MODULES: 0.0, ATTENTION: 0.0}
        self._make_s_per_byte = 0.0
        self._step_s = 0.0
        self._prompt_token_s = 0.0
        self._prompt_tokens = 0
        self._fresh: set[Adapter] = set()

    @property
    def rank_rows(self) -> RankRows:
        """Placement in the buffers that steps use now."""
        return self._now.rank_rows

    @property
    def num_slots(self) -> int:
        """X: adapters that the buffers which steps use now have room for."""
        return num_slots(self.rank_rows.bucket)

    @property
    def layers(self) -> list[LayerRows]:
        """The buffers that steps use now, per layer."""
        return self._now.layers

    def layers_for(self, reach: Reach) -> list[LayerRows]:
        """What a step of this kind reads of them."""
        if reach is not Reach.ATTENTION:
            return self.layers
        now = self._now
        if now.attention is None:
            now.attention = list(map(attention_rows, now.layers))
        return now.attention

    def slot_of(self, adapter: Adapter) -> int:
        """See RankRows.index_of."""
        return self._now.rank_rows.index_of(adapter)

    def holds(self, adapter: Adapter) -> bool:
        """Whether the next step can use the adapter without copying anything first, and without a long one before."""
        return self._now.rank_rows.holds(adapter) and adapter not in self._fresh

    def reset(self) -> None:
        """Forgets all rows: the next step with adapters begins with fresh buffers of the size it needs."""
        self._now, self._next = _Side(RankRows(self.buckets, self._geometry.num_layers)), None

    def keep_largest(self) -> None:
        """Leaves only the largest size, so that there is less to compile."""
        self.buckets = self.buckets[-1:]
        self.reset()

    def forget(self, adapter: Adapter) -> None:
        """Drops an unloaded adapter."""
        for side in filter(None, (self._now, self._next)):
            side.rank_rows.forget(adapter)

    def activate(
        self,
        adapters: list[Adapter],
        pool: jax.Array,
        pages_of: PagesOf,
        *,
        ahead: Iterable[Adapter] = (),
        after_idle: bool = False,
        num_prompt_tokens: int = 0,
    ) -> RowPlan:
        """Brings in whatever the adapters of a step still lack and the tables up to date.

        Args:
            adapters: distinct ones, resident.
            pool: uint[L, P, E].
            pages_of: page ids of a resident adapter.
            ahead, after_idle: see RankRows.plan.
            num_prompt_tokens: of the step.
        """
        now, self._prompt_tokens = self._now, num_prompt_tokens
        plan = now.rank_rows.plan(adapters, ahead=ahead, after_idle=after_idle)
        if plan.rebuild:
            # The old buffers go before the new ones are made.
            now.layers, now.attention, self._next = [], None, None
            while len(now.layers) < self._geometry.num_layers:
                now.layers += self._programs.get("rows", plan.bucket)()
        for copy in plan.copies:
            self._insert(now, copy, pool, pages_of)
        if not adapters:
            return plan
        if now.rank_rows.changed:
            host = self._host = now.rank_rows.tables()
            owner_R, scale_LMR, const_LMR = self._put((host.owner_R, host.scale_LMR, host.const_LMR))
            self.tables = LoRARows([], owner_R, scale_LMR, const_LMR, None)
            self.extra = None
        if plan.reach is Reach.EXTENDED:
            # An adapter may have been evicted and loaded again to other pages since its rows were copied.
            key = [(adapter, list(pages_of(adapter))) for adapter in adapters if adapter.layout.vocab is not None]
            if self.extra is None or key != self._vocab_key:
                host, slots, num_pages = self._host, num_slots(plan.bucket), self._geometry.num_pages
                vocab: Any = vocab_tables(adapters, pages_of, self.slot_of, num_pages, slots)
                self.extra = ExtraTables(*self._put((host.gain_LMR, host.norm_L2R, vocab)))
                self._vocab_key = key
        return plan

    def time_copies(self, pool: jax.Array) -> None:
        """Finds out what making buffers and copying rows takes here; called when everything is compiled."""
        if not self.buckets:
            return
        bucket, num_groups = self.buckets[:2][-1], len(self._firsts)
        shape_LCU = self._geometry.num_layers, ROW_BLOCK, self._num_units
        # From all over the pool, as the units of an adapter are.
        units_LCU = np.arange(np.prod(shape_LCU), dtype=np.int32).reshape(shape_LCU)
        units, start = self._put((units_LCU % (pool.size // self._geometry.unit), np.int32(0)))

        def timed(program: Any, *args: Any) -> tuple[float, Any]:
            begin = time.perf_counter()
            result = jax.block_until_ready(program(*args))
            return time.perf_counter() - begin, result

        # Several, all kept: memory that was used before costs less than what the system has to give first.
        made = [timed(self._programs.get("rows", bucket)) for _ in range(4)]
        layers = made[0][1]
        self._make_s_per_byte = sorted(seconds for seconds, _ in made[1:])[1] / _num_bytes(layers)
        del made
        for modules in self._copy_s:
            program = self._programs.get("insert", bucket, modules)
            found = []
            for _ in range(5):  # the best counts: whatever else the machine does can only take time
                seconds, layers = timed(program, layers, pool, units, self._firsts[0], start)
                found.append(seconds)
            self._copy_s[modules] = min(found) * num_groups

    def saw_step(self, seconds: float, num_prompt_tokens: int = 0) -> None:
        """Tells how long a step took."""
        if not num_prompt_tokens:
            self._step_s = _averaged(self._step_s, seconds)
        elif self._step_s:
            self._prompt_token_s = _averaged(self._prompt_token_s, max(0.0, seconds - self._step_s) / num_prompt_tokens)

    def stage(
        self,
        active: list[Adapter],
        wanted: list[Adapter],
        pool: jax.Array,
        pages_of: PagesOf,
        *,
        empty_seats: float = 0.0,
        spent_s: float = 0.0,
    ) -> None:
        """Copies some of what steps to come will need: as much as its share of a step's time allows.

        Args:
            active: adapters of the running sequences.
            wanted: resident adapters of sequences that wait, the most urgent first; they fit beside the active ones.
            empty_seats: share of the seats that stand empty while sequences wait.
            spent_s: what else the coming step has to wait for, of the same share.
        """
        self._fresh = set()
        both = list(dict.fromkeys((*active, *wanted)))
        if not both:
            return
        target = self._now.rank_rows.target(both)
        step_s = self._step_s + self._prompt_token_s * self._prompt_tokens
        whole_s = min(max(STAGE_SHARE, empty_seats / 2), MOST_STAGE_SHARE) * step_s
        left_s = whole_s - spent_s
        side = self._now
        if target != self._now.rank_rows.bucket:
            if self._next is None or self._next.rank_rows.bucket != target:
                self._next = _Side(RankRows(self.buckets, self._geometry.num_layers, target))
            side = self._next
            while len(side.layers) < self._geometry.num_layers:
                group = self._programs.get("rows", target)()
                side.layers += group
                left_s -= _num_bytes(group) * self._make_s_per_byte
                if left_s <= 0:
                    return
        else:
            self._next = None
        side.rank_rows.place(both, both)
        fresh: set[Adapter] = set()
        for adapter in both:
            copy_s = self._copy_s[_modules(adapter)]
            while (left_s >= copy_s or not fresh) and (copies := side.rank_rows.take_copies(adapter, 1)):
                fresh.add(adapter)
                self._insert(side, copies[0], pool, pages_of)
                left_s -= copy_s
        if side is self._next and all(map(side.rank_rows.holds, both)):
            side.rank_rows.changed = True
            self._now, self._next = side, None
        if left_s < whole_s / 2 and not self._prompt_tokens:
            # This step is long as it is: who got his rows only now does not make it longer still by running in it.
            # Beside prompts he does no harm: one after another they would take a step each.
            self._fresh = fresh.difference(active)

    def _insert(self, side: _Side, copy: RowCopy, pool: jax.Array, pages_of: PagesOf) -> None:
        adapter, first_row, buffer_row = copy
        pairs = [adapter.layout.row_units(m, first_row, ROW_BLOCK) for m in range(len(MODULES))]
        units_LCU = np.concatenate([units for pair in pairs for units in pair], 2)
        # Unit 0 of the pool where there is no such row.
        units_LCU = np.maximum(self._geometry.unit_addresses(np.asarray(pages_of(adapter)), units_LCU), 0)
        self._copy(side, units_LCU, buffer_row, _modules(adapter), pool)

    def _copy(
        self, side: _Side, units_LCU: np.ndarray, buffer_row: int, modules: tuple[str, ...], pool: jax.Array
    ) -> None:
        program = self._programs.get("insert", side.rank_rows.bucket, modules)
        units, start = self._put((units_LCU, np.int32(buffer_row)))
        group, side.attention = self._programs.group, None
        for n, first in enumerate(self._firsts):
            where = slice(n * group, (n + 1) * group)
            side.layers[where] = program(side.layers[where], pool, units, first, start)


def _averaged(average: float, value: float) -> float:
    return _KEEP * average + (1 - _KEEP) * value if average else value


def _num_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _modules(adapter: Adapter) -> tuple[str, ...]:
    """What is copied of an adapter; the stale rows of other modules are multiplied by 0."""
    return ATTENTION if adapter.layout.reach is Reach.ATTENTION else MODULES
