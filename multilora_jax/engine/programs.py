"""The compiled programs that a runner needs, for one model on one mesh.

A step is three kinds of program: `begin` (embedding), `layers` (a group of layers, run once per group) and `finish`
(head and sampling). Groups keep compiling cheap: one group is compiled however many run, and on a CPU, where
compiling thirty unrolled layers takes ten seconds of two cores, groups of three cost nothing that can be measured.
Accelerators run all layers as one group. Programs are compiled ahead of time and called as such: a shape that was not
foreseen is an error, never a silent recompilation.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multilora_jax.engine.batch import BatchShape, empty_batch
from multilora_jax.engine.edits import empty_edits
from multilora_jax.engine.hosts import Hosts
from multilora_jax.engine.lora_plans import empty_plan
from multilora_jax.engine.rank_rows import ROW_BLOCK, HostTables, num_slots
from multilora_jax.engine.step_functions import block_logprobs, finish, run_layers, start_step
from multilora_jax.engine.vocab_tables import empty_tables
from multilora_jax.lora.layout import Reach
from multilora_jax.memory.pool import POOL_SPEC, pool_program, read_page, write_page
from multilora_jax.models.batch import (
    ExtraTables,
    ForwardBatch,
    LayerRows,
    LoRARows,
    SamplingEdits,
    UnitTable,
    VocabInputs,
)
from multilora_jax.models.in_place import insert_units, table_columns
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import vocab_inputs
from multilora_jax.models.loader import param_specs
from multilora_jax.models.rows import attention_rows, insert_rows, layer_rows_spec, make_rows, unit_columns

log = logging.getLogger(__name__)

MAX_CPU_GROUP = 4
"""Most layers of one program on a CPU."""

TOKENS_FIRST_FROM = 96
"""Tokens of a step from which on float32 products on CPUs are faster with activations laid out [T, features]: those of
SmolLM2's layers take 65 ms against 75 at 64 tokens, and 304 against 260 at 288."""


def layer_group(num_layers: int, platform: str) -> int:
    """Layers of one program: all, or on a CPU the largest divisor up to MAX_CPU_GROUP."""
    if platform != "cpu":
        return num_layers
    return max(n for n in range(1, MAX_CPU_GROUP + 1) if num_layers % n == 0)


def layers_key(shape: BatchShape, rows: int, reach: Reach, own_rows: int = 0) -> tuple[Any, ...]:
    """Key of a program of layers, see Programs.get."""
    return ("layers", shape, rows, reach, *([own_rows] if own_rows else []))


class Programs:
    """Compiles programs once each; safe to use from several threads.

    Args:
        spec: of the model; mesh: devices.
        params: Llama.params(), for their shapes.
        pool: the pool, for its shape.
        table_width: pages of a page table.
        max_rank_rows: the most rank rows of a step.
        max_rows: the most rows of a step.

    Attributes:
        num_compilations: programs compiled, or loaded from the persistent cache, so far.
        hosts: the other hosts of the model, which run every program too; None where there are none.
        group: layers of one `layers` program.
        announces: whether each program compiled is told in the log, as those are that a request had to wait for.
    """

    def __init__(
        self,
        spec: LlamaSpec,
        mesh: Mesh,
        params: dict[str, Any],
        pool: jax.Array,
        table_width: int,
        max_rank_rows: int,
        max_rows: int,
    ):
        self.spec = spec
        self.mesh = mesh
        self._platform = mesh.devices.flat[0].platform
        self.group = layer_group(spec.config.num_layers, self._platform)
        self.num_compilations = 0
        self.announces = False
        self.hosts: Hosts | None = None
        self._params = params
        self._specs = param_specs(spec)
        self._pool: Any = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=pool.sharding)
        self._table_width = table_width
        self._max_rank_rows = max_rank_rows
        self._max_rows = max_rows
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()

    def get(self, *key: Any) -> Any:
        """The program of a key, compiled now if it never was.

        Keys: ("begin", shape, rows, extended), ("layers", shape, rows, reach[, LlamaSpec.own_rows]),
        ("finish" | "finish_edited", shape, extended), ("insert", rows, modules), ("rows", rows), ("units",),
        ("insert_units",), ("write_page",), ("read_page",), ("new_pool",), ("logprobs", extended), where rows is the
        number of active rank rows and reach what their adapters change; an edited finish is for steps with a row that
        has SamplingEdits. An extended step has the most rows. Rows are copied by "rows" and "insert", or read in place
        as "units" says.
        """
        program = self._programs.get(key)
        if program is None:
            start = time.perf_counter()
            program = self.lower(*key).compile()
            if self.announces:
                log.info("compiled %s in %.2f s", " ".join(map(str, key)), time.perf_counter() - start)
            if self.hosts is not None and self.hosts.rank == 0:
                self.hosts.compile(key)
                program = functools.partial(self.hosts.call, key, program)
            with self._lock:
                self.num_compilations += key not in self._programs
                program = self._programs.setdefault(key, program)
        return program

    def layers_at_once(self, shape: BatchShape) -> int:
        """Layers of one program of a step of this shape.

        On a CPU a program holds 3 to 10 MB for each of its layers. Most programs are of steps with prompts, which take
        so long that it does not matter how many programs they are made of.
        """
        return 1 if shape.num_prompt_tokens and self._platform == "cpu" else self.group

    def lower(self, *key: Any) -> Any:
        """The program of a key, not compiled yet."""
        return getattr(self, f"_{key[0]}")(*key[1:])

    def _step_spec(self, shape: BatchShape) -> LlamaSpec:
        """The spec that the layers of a step are compiled for: many tokens may lie in another layout."""
        many = self.spec.quantization is None and shape.num_tokens >= TOKENS_FIRST_FROM
        return replace(self.spec, features_first=False) if many else self.spec

    def _jit(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Any:
        """fn as it runs on the mesh: as it is on one device, once per shard on several."""
        if self.spec.geometry.tp > 1:
            fn = jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(fn, donate_argnums=donate)

    def table_rows(self, rows: int) -> int:
        """Rows of the tables of a step with so many: there is only one table of unit addresses, the largest."""
        return self._max_rank_rows if rows and self.spec.in_place else rows

    def empty_step(self, shape: BatchShape, rows: int, extended: bool) -> ForwardBatch:
        """A batch of padding only, as the programs of a step take it (numpy leaves)."""
        slots = num_slots(self.table_rows(rows))
        if not rows or not self.spec.in_place:
            return empty_batch(shape, self.spec, self._table_width, slots)
        batch = empty_batch(shape, self.spec, self._table_width, slots if extended else 0)
        return replace(batch, plan=empty_plan(shape, rows))

    def _batch(self, shape: BatchShape, rows: int, extended: bool) -> ForwardBatch:
        spec = self.spec
        batch = self.abstract(self.empty_step(shape, rows, extended))
        if rows:
            num_rows = self.table_rows(rows)
            tables = self.abstract(vars(HostTables.empty(spec.config.num_layers, num_rows)))
            extra = None
            if extended:
                vocab = self.abstract(empty_tables(spec.geometry.num_pages, num_slots(num_rows)))
                extra = ExtraTables(tables["gain_LMR"], tables["norm_L2R"], vocab)
            batch.lora = LoRARows([], tables["owner_R"], tables["scale_LMR"], tables["const_LMR"], extra)
        return batch

    def _begin(self, shape: BatchShape, rows: int, extended: bool) -> Any:
        fn, arguments = self._start(shape, rows, extended, self._step_spec(shape))
        fn = self._jit(fn, (self._specs["top"], P(), P(), P(), POOL_SPEC if extended else None), P())
        return fn.lower(*arguments)

    def _start(self, shape: BatchShape, rows: int, extended: bool, spec: LlamaSpec) -> tuple[Any, tuple[Any, ...]]:
        """`start_step` of a shape, and its arguments."""
        batch = self._batch(shape, rows, extended)
        like = replace(batch, lora=None)
        size = sum(leaf.size for leaf in jax.tree.leaves(like))
        flat_N, sampled_S = self.abstract((np.zeros(size, np.int32), np.zeros(self._max_rows, np.int32)))
        pool = self._pool if extended else None
        fn = functools.partial(start_step, spec=spec, like=like)
        return fn, (self._params["top"], flat_N, sampled_S, batch.lora, pool)

    @staticmethod
    def _vocab_specs(extended: bool) -> Any:
        specs: Any = (POOL_SPEC, P(), P(), P())
        return VocabInputs(*specs) if extended else None

    def _layers(self, shape: BatchShape, rows: int, reach: Reach, own_rows: int = 0) -> Any:
        n, layers, extended = self.layers_at_once(shape), self._params["layers"], reach is Reach.EXTENDED
        strip = attention_rows if reach is Reach.ATTENTION else lambda rows: rows
        spec = replace(self._step_spec(shape), own_rows=own_rows)
        fn, arguments = self._start(shape, rows, extended, replace(spec, axis_name=None))
        # Without the pool: what adapters do to the embedding changes no shape.
        x, inputs, *_ = self.abstract(jax.eval_shape(fn, *arguments[:-1], None))
        row_buffers: Any = [None] * n
        row_specs: Any = [None] * n
        if rows and spec.in_place:
            row_buffers, row_specs = self._unit_table(), P()
        elif rows:
            row_buffers = list(map(strip, self._row_buffers(rows)[:n]))
            row_specs = [strip(layer_rows_spec(self.spec, rows))] * n
        fn = self._jit(
            functools.partial(run_layers, spec=spec),
            (self._specs["layers"][:n], row_specs, POOL_SPEC, P(), P(), P()),
            (P(), POOL_SPEC),
            donate=(2, 4),
        )
        return fn.lower(layers[:n], row_buffers, self._pool, self.abstract(np.int32(0)), x, inputs)

    def _finish_edited(self, shape: BatchShape, extended: bool) -> Any:
        return self._finish(shape, extended, (self.abstract(empty_edits(shape.num_rows, self.spec)),))

    def _finish(self, shape: BatchShape, extended: bool, edits: tuple[SamplingEdits, ...] = ()) -> Any:
        tokens, width = shape.num_tokens, self.spec.config.hidden_size
        features_first = self._step_spec(shape).features_first
        x = np.zeros((width, tokens) if features_first else (tokens, width), np.float32)
        turned = features_first != self.spec.features_first
        batch = self._batch(shape, self._max_rank_rows if extended else 0, extended)
        specs = (self._specs["top"], P(), P(), self._vocab_specs(extended), *(P() for _ in edits))
        fn = functools.partial(finish, spec=self.spec, max_rows=self._max_rows, turned=turned)
        fn = self._jit(fn, specs, P())
        return fn.lower(self._params["top"], self.abstract(x), batch.sampling, vocab_inputs(self._pool, batch), *edits)

    def _insert(self, rows: int, modules: tuple[str, ...]) -> Any:
        specs, g = [layer_rows_spec(self.spec, rows)] * self.group, self.spec.geometry
        fn = self._jit(
            functools.partial(insert_rows, self.spec, modules=modules),
            (specs, POOL_SPEC, P(), P(), P()),
            specs,
            donate=(0,),
        )
        units_LCU = np.zeros((g.num_layers, ROW_BLOCK, max(c.stop for c in unit_columns(g).values())), np.int32)
        return fn.lower(self._row_buffers(rows), self._pool, *self.abstract((units_LCU, np.int32(0), np.int32(0))))

    def _rows(self, rows: int) -> Any:
        shardings = self._shardings([layer_rows_spec(self.spec, rows)] * self.group)
        return jax.jit(functools.partial(make_rows, self.spec, rows, self.group), out_shardings=shardings).lower()

    def _unit_table(self) -> UnitTable:
        """That of adapters that are read in place, described."""
        g = self.spec.geometry
        width = max(columns.stop for columns in table_columns(g).values())
        units_LRU: Any = np.zeros((g.num_layers, self._max_rank_rows, width), np.int32)
        return self.abstract(UnitTable(units_LRU))

    def _units(self) -> Any:
        shape = self._unit_table().units_LRU.shape
        fn = jax.jit(lambda: UnitTable(jnp.full(shape, -1, jnp.int32)), out_shardings=NamedSharding(self.mesh, P()))
        return fn.lower()

    def _insert_units(self) -> Any:
        table = self._unit_table()
        L, _, U = table.units_LRU.shape
        fn = jax.jit(insert_units, donate_argnums=0, out_shardings=NamedSharding(self.mesh, P()))
        return fn.lower(table, *self.abstract((np.zeros((L, ROW_BLOCK, U), np.int32), np.int32(0))))

    def _write_page(self) -> Any:
        g = self.spec.geometry
        page = np.zeros((g.num_layers, g.page_elements), g.storage_dtype)
        return write_page.lower(self._pool, self.abstract(page, P(None, "model")), self.abstract(np.int32(0)))

    def _new_pool(self) -> Any:
        return pool_program(self.spec.geometry, self.mesh).lower()

    def _read_page(self) -> Any:
        # Of several hosts the one that reads has only its own devices' part.
        options: dict[str, Any] = {} if self.hosts is None else {"out_shardings": NamedSharding(self.mesh, P())}
        return jax.jit(read_page, **options).lower(self._pool, self.abstract(np.int32(0)))

    def _logprobs(self, extended: bool) -> Any:
        width, block = self.spec.config.hidden_size, self.spec.prefill_block
        hidden = np.zeros((width, block) if self.spec.features_first else (block, width), self.spec.dtype)
        # One row for each position.
        batch = self._batch(BatchShape(0, 0, block), self._max_rank_rows if extended else 0, extended)
        specs = (self._specs["top"], P(), P(), P(), self._vocab_specs(extended))
        fn = self._jit(functools.partial(block_logprobs, spec=self.spec), specs, P())
        arrays = self.abstract((hidden, np.zeros(block, np.int32), np.zeros(block, np.int32)))
        return fn.lower(self._params["top"], *arrays, vocab_inputs(self._pool, batch))

    def _row_buffers(self, rows: int) -> list[LayerRows]:
        """Those of one group of layers, described."""
        shapes = jax.eval_shape(functools.partial(make_rows, self.spec, rows, self.group))
        shardings = self._shardings([layer_rows_spec(self.spec, rows)] * self.group)
        return jax.tree.map(lambda s, d: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=d), shapes, shardings)

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs, is_leaf=lambda s: isinstance(s, P))

    def abstract(self, tree: Any, spec: P | None = None) -> Any:
        """Shapes and types of a tree's leaves, placed on the mesh."""
        sharding = NamedSharding(self.mesh, spec or P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
