"""The only holder of parameters, pool and row buffers: runs what the scheduler planned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from multilora_jax.engine.batch import BatchShape, BuiltBatch, batch_shapes, build_batch, empty_batch, table_width
from multilora_jax.engine.host_memory import release_freed_memory
from multilora_jax.engine.programs import Programs
from multilora_jax.engine.rank_rows import ROW_BLOCK, RankRows, row_buckets
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.lora.packing import HostAdapter
from multilora_jax.memory.geometry import MODULES
from multilora_jax.memory.pool import make_pool
from multilora_jax.models.batch import ForwardBatch, LayerRows, LoRARows
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import Llama
from multilora_jax.models.sampler import StepOutput

PagesOf = Callable[[HostAdapter], list[int]]


class ModelRunner:
    """Runs scheduled steps of one model on one mesh.

    Args:
        model: the base.
        mesh: devices, axis "model".
        max_num_seqs, max_blocks: largest step.
        max_model_len: longest sequence, in tokens.
        max_rank_rows: most rank rows of a step; 0 serves the base alone.

    Attributes:
        loaded_bytes: bytes of adapters copied into the pool so far.
    """

    def __init__(
        self, model: Llama, mesh: Mesh, *, max_num_seqs: int, max_blocks: int, max_model_len: int, max_rank_rows: int
    ):
        self.spec: LlamaSpec = model.spec
        self.mesh = mesh
        self.params = model.params()
        self.pool = make_pool(self.spec.geometry, mesh)
        self.shapes = batch_shapes(max_num_seqs, max_blocks)
        self.width = table_width(max_model_len, self.spec.geometry)
        self.rank_rows = RankRows(row_buckets(max_rank_rows) if max_rank_rows else [], self.spec.config.num_layers)
        self.programs = Programs(self.spec, mesh, self.params, self.pool, self.width)
        self.loaded_bytes = 0
        self._row_layers: list[LayerRows] = []
        self._row_tables: LoRARows | None = None  # owners and scales, no layers
        group = self.programs.group
        # Layer indices live on the device: passing one must not cost a transfer at every step.
        self._groups = [
            (self.params["layers"][first : first + group], slice(first, first + group), self._put(np.int32(first)))
            for first in range(0, self.spec.config.num_layers, group)
        ]

    @property
    def num_compilations(self) -> int:
        """Programs compiled or loaded so far; it does not move after `warm_up`."""
        return self.programs.num_compilations

    def warm_up(self, *, progress: bool = True, threads: int = 2) -> None:
        """Compiles every program a step can need, with a progress bar, and runs each kind of step once."""
        keys: list[tuple[Any, ...]] = []
        for rows in (0, *self.rank_rows.buckets):
            for shape in self.shapes:
                keys += [("begin", shape, rows), ("layers", shape, rows)]
        keys += [("finish", shape) for shape in self.shapes] + [("logprobs",)]
        for rows in self.rank_rows.buckets:
            keys += [("insert", rows), ("rows", rows)]
        if self.rank_rows.buckets:
            keys.append(("write_page",))
        pool = ThreadPoolExecutor(threads)
        try:
            futures = [pool.submit(self.programs.get, *key) for key in keys]
            done = as_completed(futures)
            for future in tqdm(done, total=len(keys), desc="Compiling", unit="program", disable=not progress):
                future.result()
                release_freed_memory()  # compilers leave much of it with the allocator
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for the programs under way only
        for shape in (self.shapes[0], self.shapes[-1]):
            self._run(empty_batch(shape, self.spec.prefill_block, self.width), shape, 0).token_S.block_until_ready()

    def write_pages(self, writes: list[tuple[HostAdapter, list[int]]]) -> None:
        """Copies adapters into the pages they were given."""
        for adapter, page_ids in writes:
            program = self.programs.get("write_page")
            pages = adapter.pages.reshape(*adapter.pages.shape[:2], -1)
            for page, page_id in zip(pages, page_ids, strict=True):
                self.pool = program(self.pool, self._put(page, P(None, "model")), self._put(np.int32(page_id)))
            self.loaded_bytes += adapter.pages.nbytes

    def execute(self, step: ScheduledStep, pages_of: PagesOf) -> tuple[BuiltBatch, StepOutput]:
        """Runs a step; the result is on its way when this returns.

        Args:
            step: from the scheduler.
            pages_of: page ids of a resident adapter.
        """
        rows = self._activate(step.adapters, pages_of)
        built = build_batch(
            step, self.shapes, self.spec.geometry, self.spec.prefill_block, self.width, self.rank_rows.index_of
        )
        return built, self._run(built.batch, built.shape, rows)

    def prompt_logprobs(self, hidden: np.ndarray, start: int, targets: list[int]) -> list[tuple[Any, ...]]:
        """Log-probabilities of given next tokens.

        Args:
            hidden: StepOutput.hidden on the host.
            start: index in T of the position before the first target.
            targets: token ids.

        Returns:
            per target (logprob, rank, top_ids, top_logprobs).
        """
        block, axis = self.spec.prefill_block, 1 - self.spec.feature_axis
        program = self.programs.get("logprobs")
        result: list[tuple[Any, ...]] = []
        for first in range(0, len(targets), block):
            part = targets[first : first + block]
            indices = np.minimum(start + first + np.arange(block), hidden.shape[axis] - 1)
            ids = np.zeros(block, np.int32)
            ids[: len(part)] = part
            taken = np.ascontiguousarray(np.take(hidden, indices, axis))
            values = program(self.params["top"], self._put(taken), self._put(ids))
            result += list(zip(*(np.asarray(v)[: len(part)] for v in values), strict=True))
        return result

    def _run(self, batch: ForwardBatch, shape: BatchShape, rows: int) -> StepOutput:
        batch.lora = self._row_tables if rows else None
        batch = self._put(batch)
        x, inputs = self.programs.get("begin", shape, rows)(self.params["top"], batch)
        layers = self.programs.get("layers", shape, rows)
        no_rows = [None] * self.programs.group
        for weights, where, first in self._groups:
            x, self.pool = layers(weights, self._row_layers[where] if rows else no_rows, self.pool, first, x, inputs)
        return self.programs.get("finish", shape)(self.params["top"], x, batch.sampling)

    def _activate(self, adapters: list[HostAdapter], pages_of: PagesOf) -> int:
        """Brings the adapters' rank rows into the buffers; returns the number of buffer rows, 0 without adapters."""
        plan = self.rank_rows.plan(adapters)
        if plan.rebuild:
            self._row_layers = []  # free the old buffers before the new ones are made
            self._row_layers = self.programs.get("rows", plan.bucket)()
        for adapter, first_row, buffer_row in plan.copies:
            self._insert(plan.bucket, self._row_units(adapter, first_row, np.asarray(pages_of(adapter))), buffer_row)
        if plan.changed:
            self._row_tables = LoRARows([], *self._put(self.rank_rows.tables()))
        return plan.bucket

    def _insert(self, rows: int, units: tuple[list[np.ndarray], list[np.ndarray]], buffer_row: int) -> None:
        program, start = self.programs.get("insert", rows), self._put(np.int32(buffer_row))
        for _, where, _ in self._groups:
            a_units, b_units = self._put(tuple([u[where] for u in kind] for kind in units))
            self._row_layers[where] = program(self._row_layers[where], self.pool, a_units, b_units, start)

    def _put(self, tree: Any, spec: P | None = None) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, spec or P()))

    def _row_units(
        self, adapter: HostAdapter, first_row: int, page_ids: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Unit addresses of ROW_BLOCK rank rows of every module; unit 0 of the pool where there is no such row."""
        addresses = self.spec.geometry.unit_addresses
        a_units, b_units = [], []
        for m in range(len(MODULES)):
            a, b = adapter.row_units(m, first_row, ROW_BLOCK)
            a_units.append(np.maximum(addresses(page_ids, a), 0))
            b_units.append(np.maximum(addresses(page_ids, b), 0))
        return a_units, b_units
