"""The only holder of parameters, pool and row buffers: compiles the steps and runs them."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from multilora_jax.engine.batch import BatchShape, BuiltBatch, batch_shapes, build_batch, empty_batch, table_width
from multilora_jax.engine.rank_rows import ROW_BLOCK, RankRows, row_buckets
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.lora.packing import HostAdapter
from multilora_jax.memory.geometry import MODULES
from multilora_jax.memory.pool import POOL_SPEC, make_pool, write_page
from multilora_jax.models.batch import ForwardBatch, LoRARows
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import Llama, compute_logits, forward, take_tokens
from multilora_jax.models.loader import param_specs
from multilora_jax.models.rows import LAYER_ROWS_SPEC, insert_rows, make_rows
from multilora_jax.models.sampler import StepOutput, sample, token_logprobs


def run_step(
    params: dict[str, Any], pool: jax.Array, batch: ForwardBatch, *, spec: LlamaSpec
) -> tuple[jax.Array, StepOutput]:
    """One step: forward, logits of the sampling rows, next tokens. DONATES pool when jitted so."""
    pool, hidden = forward(params, pool, batch, spec=spec)
    logits_SV = compute_logits(params, take_tokens(spec, hidden, batch.sample_S), spec=spec)
    token_S = sample(logits_SV, batch.sampling, batch.positions_T[batch.sample_S] + 1)
    wanted = jnp.any(batch.sampling.num_logprobs_S >= 0)
    return pool, StepOutput(token_S, *token_logprobs(logits_SV, token_S, wanted), hidden)


def block_logprobs(params: dict[str, Any], hidden: jax.Array, target_Q: jax.Array, *, spec: LlamaSpec) -> Any:
    """token_logprobs of one prefill block's positions; hidden in the activation layout."""
    logits_QV = compute_logits(params, hidden, spec=spec)
    return token_logprobs(logits_QV, target_Q, jnp.bool_(True))


class ModelRunner:
    """Runs scheduled steps of one model on one mesh.

    Args:
        model: the base.
        mesh: devices, axis "model".
        max_num_seqs, max_blocks: largest step.
        max_model_len: longest sequence, in tokens.
        max_rank_rows: most rank rows of a step; 0 serves the base alone.

    Attributes:
        num_compilations: programs compiled or loaded so far; it does not move after `warm_up`.
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
        self._rows: LoRARows | None = None
        self._programs: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self.num_compilations = 0
        self.loaded_bytes = 0

    # Programs

    def _sharded(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        """fn as it runs on the mesh: as it is on one device, once per shard on several."""
        if self.spec.geometry.tp == 1:
            return fn
        return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _step_fn(self, with_lora: bool) -> Any:
        layers = [LAYER_ROWS_SPEC] * self.spec.config.num_layers
        lora = LoRARows(layers, P(), P()) if with_lora else None  # pyright: ignore[reportArgumentType]
        batch = jax.tree.map(lambda _: P(), empty_batch(self.shapes[0], self.spec.prefill_block, self.width))
        batch.lora = lora
        fn = functools.partial(run_step, spec=self.spec)
        return self._sharded(fn, (param_specs(self.spec), POOL_SPEC, batch), (POOL_SPEC, P()))

    def _program(self, key: tuple[Any, ...]) -> Any:
        program = self._programs.get(key)
        if program is None:
            lowered = self._lower(key)
            program = lowered.compile()
            with self._lock:
                self.num_compilations += 1
                self._programs.setdefault(key, program)
        return program

    def _lower(self, key: tuple[Any, ...]) -> Any:
        spec, kind = self.spec, key[0]
        rows_specs = [LAYER_ROWS_SPEC] * spec.config.num_layers
        if kind == "step":
            shape, bucket = key[1], key[2]
            lora = self._abstract_rows(bucket) if bucket else None
            batch = self._abstract(empty_batch(shape, spec.prefill_block, self.width))
            batch.lora = lora
            fn = jax.jit(self._step_fn(bucket > 0), donate_argnums=1)
            return fn.lower(self.params, self._abstract_pool(), batch)
        if kind == "insert":
            a_units, b_units = self._row_units(None, 0)
            fn = self._sharded(
                functools.partial(insert_rows, spec), (rows_specs, POOL_SPEC, P(), P(), P()), rows_specs
            )
            rows = self._abstract_rows(key[1]).layers
            return jax.jit(fn, donate_argnums=0).lower(
                rows, self._abstract_pool(), self._abstract(a_units), self._abstract(b_units), self._abstract(0)
            )
        if kind == "rows":
            fn = jax.jit(functools.partial(make_rows, spec, key[1]), out_shardings=self._shardings(rows_specs))
            return fn.lower()
        if kind == "write_page":
            g = spec.geometry
            page = np.zeros((g.num_layers, g.tp, g.page_elements // g.tp), g.storage_dtype)
            return write_page.lower(self._abstract_pool(), self._abstract(page, P(None, "model")), self._abstract(0))
        assert kind == "logprobs"
        width, block = spec.config.hidden_size, spec.prefill_block
        hidden = np.zeros((width, block) if spec.features_first else (block, width), spec.dtype)
        fn = self._sharded(functools.partial(block_logprobs, spec=spec), (param_specs(spec), P(), P()), P())
        return jax.jit(fn).lower(self.params, self._abstract(hidden), self._abstract(np.zeros(block, np.int32)))

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs, is_leaf=lambda s: isinstance(s, P))

    def _abstract(self, tree: Any, spec: P | None = None) -> Any:
        sharding = NamedSharding(self.mesh, spec or P())

        def leaf(x: Any) -> jax.ShapeDtypeStruct:
            x = np.asarray(x, np.int32) if isinstance(x, int) else x
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(leaf, tree)

    def _abstract_pool(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.pool.shape, self.pool.dtype, sharding=self.pool.sharding)

    def _abstract_rows(self, bucket: int) -> LoRARows:
        shapes = jax.eval_shape(functools.partial(make_rows, self.spec, bucket))
        shardings = self._shardings([LAYER_ROWS_SPEC] * self.spec.config.num_layers)
        layers = jax.tree.map(lambda s, d: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=d), shapes, shardings)
        owner = np.zeros(bucket, np.int32)
        scale = np.zeros((self.spec.config.num_layers, len(MODULES), bucket), np.float32)
        return LoRARows(layers, self._abstract(owner), self._abstract(scale))

    def warm_up(self, *, progress: bool = True, threads: int = 2) -> None:
        """Compiles every program a step can need, with a progress bar, and runs the smallest once."""
        keys: list[tuple[Any, ...]] = [("step", shape, bucket) for bucket in (0, *self.rank_rows.buckets)
                                       for shape in self.shapes]  # fmt: skip
        for bucket in self.rank_rows.buckets:
            keys += [("insert", bucket), ("rows", bucket)]
        keys += [("logprobs",)] + ([("write_page",)] if self.rank_rows.buckets else [])
        with (
            ThreadPoolExecutor(threads) as pool,
            tqdm(total=len(keys), desc="Compiling", unit="program", disable=not progress) as bar,
        ):
            futures = [pool.submit(self._program, key) for key in keys]
            for future in as_completed(futures):
                future.result()
                bar.update()
        self._run(empty_batch(self.shapes[0], self.spec.prefill_block, self.width), self.shapes[0], 0)

    # Running

    def write_pages(self, writes: list[tuple[HostAdapter, list[int]]]) -> None:
        """Copies adapters into the pages they were given."""
        for adapter, page_ids in writes:
            program = self._program(("write_page",))
            for page, page_id in zip(adapter.pages, page_ids, strict=True):
                self.pool = program(self.pool, self._put(page, P(None, "model")), np.int32(page_id))
            self.loaded_bytes += adapter.pages.nbytes

    def execute(self, step: ScheduledStep, pages_of: Any) -> tuple[BuiltBatch, StepOutput]:
        """Runs a step; the result is on its way when this returns.

        Args:
            step: from the scheduler.
            pages_of: page ids of a resident adapter.
        """
        bucket = self._activate(step.adapters, pages_of)
        built = build_batch(
            step, self.shapes, self.spec.geometry, self.spec.prefill_block, self.width, self.rank_rows.index_of
        )
        return built, self._run(built.batch, built.shape, bucket)

    def prompt_logprobs(self, hidden: np.ndarray, start: int, targets: list[int]) -> list[tuple[Any, ...]]:
        """Log-probabilities of given next tokens.

        Args:
            hidden: StepOutput.hidden on the host.
            start: index in T of the position before the first target.
            targets: token ids.

        Returns:
            per target (logprob, rank, top_ids, top_logprobs).
        """
        block, result = self.spec.prefill_block, []
        axis = 1 - self.spec.feature_axis
        program = self._program(("logprobs",))
        for first in range(0, len(targets), block):
            part = targets[first : first + block]
            indices = np.minimum(start + first + np.arange(block), hidden.shape[axis] - 1)
            ids = np.zeros(block, np.int32)
            ids[: len(part)] = part
            values = program(self.params, np.ascontiguousarray(np.take(hidden, indices, axis)), ids)
            result += list(zip(*(np.asarray(v)[: len(part)] for v in values), strict=True))
        return result

    def _run(self, batch: ForwardBatch, shape: BatchShape, bucket: int) -> StepOutput:
        batch.lora = self._rows if bucket else None
        program = self._program(("step", shape, bucket))
        self.pool, output = program(self.params, self.pool, batch)
        return output

    def _activate(self, adapters: list[HostAdapter], pages_of: Any) -> int:
        plan = self.rank_rows.plan(adapters)
        if plan.rebuild:
            self._rows = None  # free the old buffers before the new ones are made
            layers = self._program(("rows", plan.bucket))()
        elif self._rows is not None:
            layers = self._rows.layers
        else:
            layers = []
        for adapter, first_row, buffer_row in plan.copies:
            a_units, b_units = self._row_units(adapter, first_row, np.asarray(pages_of(adapter)))
            layers = self._program(("insert", plan.bucket))(
                layers, self.pool, a_units, b_units, np.int32(buffer_row)
            )
        if plan.changed:
            owner_R, scale_LMR = self.rank_rows.tables()
            self._rows = LoRARows(layers, self._put(owner_R), self._put(scale_LMR))
        return plan.bucket

    def _put(self, array: np.ndarray, spec: P | None = None) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, spec or P()))

    def _row_units(
        self, adapter: HostAdapter | None, first_row: int, page_ids: np.ndarray | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Unit addresses of ROW_BLOCK rank rows of every module; row 0 of the pool where there is no such row."""
        g = self.spec.geometry
        a_units, b_units = [], []
        for m, module in enumerate(MODULES):
            if adapter is None or page_ids is None:
                in_dim, out_dim = g.module_dims(module)
                shapes = [(g.num_layers, ROW_BLOCK, width // g.unit) for width in (in_dim, out_dim)]
                a, b = (np.zeros(shape, np.int32) for shape in shapes)
            else:
                a, b = (np.maximum(g.unit_addresses(page_ids, u), 0)
                        for u in adapter.row_units(m, first_row, ROW_BLOCK))  # fmt: skip
            a_units.append(a)
            b_units.append(b)
        return a_units, b_units
