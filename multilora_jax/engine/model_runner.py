"""The only holder of parameters, pool and row buffers: runs what the scheduler planned."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from multilora_jax.engine.batch import (
    BatchShape,
    BuiltBatch,
    batch_shapes,
    build_batch,
    empty_batch,
    pack,
    table_width,
)
from multilora_jax.engine.edits import build_edits, empty_edits
from multilora_jax.engine.host_memory import release_freed_memory
from multilora_jax.engine.hosts import Hosts
from multilora_jax.engine.in_place_rows import InPlaceRows
from multilora_jax.engine.own_rows import OwnRows
from multilora_jax.engine.programs import Programs, layers_key
from multilora_jax.engine.rank_rows import HostTables, row_buckets
from multilora_jax.engine.row_buffers import PagesOf, RowBuffers
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.engine.warm_up import program_keys
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.layout import Reach
from multilora_jax.lora.residency import PageWrite
from multilora_jax.memory.pool import make_pool
from multilora_jax.models.base_tensors import BaseTensors
from multilora_jax.models.batch import ForwardBatch, LoRARows, SamplingEdits, UnitTable, VocabInputs
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import Llama
from multilora_jax.models.rows import attention_rows
from multilora_jax.models.sampler import StepOutput
from multilora_jax.models.shards import place
from multilora_jax.request import Sequence


class ModelRunner:
    """Runs scheduled steps of one model on one mesh.

    Args:
        model: the base.
        mesh: devices, axis "model".
        max_num_seqs, max_prompt_tokens: largest step.
        max_model_len: longest sequence, in tokens.
        max_rank_rows: most rank rows of a step; 0 serves the base alone.
        max_lora_rank: most of an adapter.
        paced: whether steps with prompts are needed in more sizes, see batch.prompt_sizes.

    Attributes:
        loaded_bytes: bytes of adapters copied into the pool so far.
        own_rows: what its steps sum over several devices.
        on_cpu: whether the model runs on this machine's own cores.
    """

    def __init__(
        self, model: Llama, mesh: Mesh, *, max_num_seqs: int, max_prompt_tokens: int, max_model_len: int,
        max_rank_rows: int, max_lora_rank: int = 0, paced: bool = False,
    ):  # fmt: skip
        self.spec: LlamaSpec = model.spec
        self.mesh = mesh
        self.params = model.params()
        self.pool = make_pool(self.spec.geometry, mesh)
        self.shapes = batch_shapes(max_num_seqs, max_prompt_tokens, self.spec.prefill_block, paced=paced)
        self._paced = paced
        self.width = table_width(max_model_len, self.spec.geometry)
        self.on_cpu = mesh.devices.flat[0].platform == "cpu"
        # Virtual devices send each other nothing that is worth more programs.
        sends = self.spec.geometry.tp > 1 and not (self.on_cpu and not self.spec.in_place)
        self.own_rows = OwnRows(max_lora_rank if sends else 0)
        # On a CPU programs are of few layers and cheap to compile; elsewhere they are of all, and there are fewer.
        fine = self.on_cpu and not self.spec.in_place
        buckets = row_buckets(max_rank_rows, fine=fine) if max_rank_rows else []
        max_rows = max(shape.num_rows for shape in self.shapes)
        self.programs = Programs(self.spec, mesh, self.params, self.pool, self.width, max((0, *buckets)), max_rows)
        self._sampled_S = self._put(np.zeros(max_rows, np.int32))
        self.loaded_bytes = 0
        self._write_s = self._written_s = 0.0
        self._no_edits: dict[int, SamplingEdits] = {}
        layers, group = self.params["layers"], self.programs.group
        # Layer indices live on the device: passing one must not cost a transfer at every step.
        self._indices = [self._put(np.int32(index)) for index in range(len(layers))]
        self._parts = {
            n: [(layers[i : i + n], slice(i, i + n), self._indices[i]) for i in range(0, len(layers), n)]
            for n in (1, group)
        }
        firsts = self._indices[::group]
        self.rows: RowBuffers | InPlaceRows
        if self.spec.in_place:
            self.rows = InPlaceRows(self.spec.geometry, self.programs, self._put, buckets)
        else:
            self.rows = RowBuffers(self.spec.geometry, self.programs, self._put, firsts, buckets)

    def restart(self) -> None:
        """After a failed step, which may have taken what it was to give back: buffers anew, the pool if it is gone.

        What was in the pool is not worth anything afterwards.

        Raises:
            ConfigError: the device has no room for the pool.
        """
        self.rows.reset()
        self._no_edits.clear()
        self._sampled_S = self._put(np.zeros(max(shape.num_rows for shape in self.shapes), np.int32))
        try:
            self.pool.block_until_ready()  # an array that a failed program was to make raises here
        except RuntimeError:
            self.pool.delete()  # what there is of it must go first
            if self.programs.hosts is None:
                self.pool = make_pool(self.spec.geometry, self.mesh)
            else:
                del self.pool
                self.pool = self.programs.get("new_pool")()

    def join(self, hosts: Hosts | None) -> None:
        """Shares the model with other hosts from now on: what is called here is called there."""
        if hosts is not None:
            hosts.join(self.mesh, (self.params, self.pool, self._sampled_S, self._indices))
            self.programs.hosts = hosts

    def base_tensors(self) -> BaseTensors:
        """The parameters under their checkpoint names; other hosts have parts of them, too."""
        hosts = self.programs.hosts
        return BaseTensors(self.spec, self.params, None if hosts is None else hosts.fetch)

    @property
    def num_compilations(self) -> int:
        """Programs compiled or loaded so far; it does not move after `warm_up`."""
        return self.programs.num_compilations

    def plain_shapes(self, rows: int) -> list[BatchShape]:
        """The sizes of plain steps with so many rank rows: not the smallest where they are many."""
        return self.shapes[1:] if rows > 64 and self.shapes[1].num_blocks == 0 else self.shapes

    @property
    def extended_shapes(self) -> list[BatchShape]:
        """The sizes of extended steps: the largest of decodes alone and, unpaced, the largest of all: few."""
        prompts = [shape for shape in self.shapes if shape.num_blocks]
        return [shape for shape in self.shapes if not shape.num_blocks][-1:] + prompts[0 if self._paced else -1 :]

    def warm_up(self, *, progress: bool = True, threads: int = 2) -> None:
        """Compiles every program a step can need, with a progress bar, and runs each kind of step once."""
        keys = program_keys(self)
        pool = ThreadPoolExecutor(threads)
        try:
            futures = [pool.submit(self.programs.get, *key) for key in keys]
            done = as_completed(futures)
            for future in tqdm(done, total=len(keys), desc="Compiling", unit="program", disable=not progress):
                future.result()
                release_freed_memory()  # compilers leave much of it with the allocator
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for the programs under way only
        for rows in (0, *self.rows.buckets):
            self._first_runs(rows)
        for shape in (self.shapes[0], self.shapes[-1]):
            batch = empty_batch(shape, self.spec, self.width)
            for edits in (None, empty_edits(shape.num_rows, self.spec)):
                self._run(batch, shape, 0, Reach.ATTENTION, lambda edits=edits: edits).token_S.block_until_ready()
        self.rows.time_copies(self.pool)
        if self.rows.buckets:
            self._time_writes()

    def _time_writes(self) -> None:
        """Finds out what writing a page of an adapter takes, on the null page, whose content nobody needs."""
        g = self.spec.geometry
        page = np.zeros((g.num_layers, g.tp, g.page_elements // g.tp), g.storage_dtype)
        found = []
        for _ in range(5):  # the best counts, as of every such figure
            self.pool.block_until_ready()
            start = time.perf_counter()
            self._write_page(0, page)
            self.pool.block_until_ready()
            found.append(time.perf_counter() - start)
        self._write_s = min(found)

    def _first_runs(self, rows: int) -> None:
        """Runs each plain program of layers once, on its first layers: the first run takes longer than all others."""
        buffers: Any = [None] * self.programs.group
        if rows:
            in_place = isinstance(self.rows, InPlaceRows)
            buffers = self.rows.layers_for(Reach.PROJECTIONS) if in_place else self.programs.get("rows", rows)()
        tables = HostTables.empty(self.spec.config.num_layers, self.programs.table_rows(rows))
        for shape in self.plain_shapes(rows):
            flat_N, lora = pack(self.programs.empty_step(shape, rows, False)), None
            if rows:
                owner_R, scale_LMR, const_LMR = self._put((tables.owner_R, tables.scale_LMR, tables.const_LMR))
                lora = LoRARows([], owner_R, scale_LMR, const_LMR, None)
            arguments = self.params["top"], flat_N, self._sampled_S, lora, None
            x, inputs, *_ = self.programs.get("begin", shape, rows, False)(*arguments)
            weights, where, first = self._parts[self.programs.layers_at_once(shape)][0]
            for key in self.plain_layers(shape, rows):
                part = buffers if isinstance(buffers, UnitTable) else buffers[where]
                if rows and key[3] is Reach.ATTENTION and not isinstance(part, UnitTable):
                    part = list(map(attention_rows, part))
                x, self.pool = self.programs.get(*key)(weights, part, self.pool, first, x, inputs)
            x.block_until_ready()

    def write_pages(self, writes: Iterable[tuple[PageWrite, np.ndarray]]) -> None:
        """Copies pages of adapters (uint[L, TP, E/TP] each) into the pages that they were given."""
        self._written_s = 0.0
        for write, page in writes:
            self._written_s += self._write_s
            self._write_page(write.page_id, page)
            self.loaded_bytes += page.nbytes

    def _write_page(self, page_id: int, page: np.ndarray) -> None:
        program, flat = self.programs.get("write_page"), page.reshape(len(page), -1)
        self.pool = program(self.pool, flat, np.int32(page_id))

    def read_pages(self, page_ids: list[int]) -> np.ndarray:
        """Pages of the pool on the host: uint[n, L, TP, E/TP]."""
        program, g = self.programs.get("read_page"), self.spec.geometry
        pages = [np.asarray(program(self.pool, np.int32(page_id))) for page_id in page_ids]
        return np.stack(pages).reshape(len(page_ids), g.num_layers, g.tp, -1)

    def stage(self, active: list[Adapter], wanted: list[Adapter], pages_of: PagesOf, empty_seats: float) -> None:
        """Prepares for adapters that later steps will use; see RowBuffers.stage."""
        self.rows.stage(active, wanted, self.pool, pages_of, empty_seats=empty_seats, spent_s=self._written_s)

    def execute(self, step: ScheduledStep, pages_of: PagesOf) -> tuple[BuiltBatch, StepOutput]:
        """Runs a step; the result is on its way when this returns.

        Args:
            step: from the scheduler.
            pages_of: page ids of a resident adapter.
        """
        how = {"ahead": step.ahead, "after_idle": step.after_idle, "num_prompt_tokens": step.num_prompt_tokens}
        plan = self.rows.activate(step.adapters, self.pool, pages_of, **how)
        shapes = self.extended_shapes if plan.reach is Reach.EXTENDED else self.plain_shapes(plan.bucket)
        built = build_batch(
            step, shapes, self.spec, self.width, self.rows.num_slots if plan.bucket else 0, self.rows.slot_of,
            self._rows_of,
        )  # fmt: skip
        if isinstance(self.rows, InPlaceRows) and plan.bucket:
            built.batch = self.rows.plan_step(built, plan)
        edits = functools.partial(build_edits, built.rows, built.shape.num_rows, self.spec)
        reach = max(plan.reach, self._plain(plan.bucket)[0])
        own_rows = self.own_rows.of(built, plan, self.rows)
        return built, self._run(built.batch, built.shape, plan.bucket, reach, edits, own_rows)

    def _rows_of(self, adapter: Adapter) -> list[int]:
        assert isinstance(self.rows, RowBuffers)
        return self.rows.rank_rows.rows_of(adapter)

    def prompt_logprobs(
        self, seq: Sequence, hidden: np.ndarray, start: int, targets: list[int]
    ) -> list[tuple[Any, ...]]:
        """Log-probabilities of given next tokens of a sequence of the step that was executed last.

        Args:
            seq: the sequence.
            hidden: StepOutput.hidden on the host.
            start: index in T of the position before the first target.
            targets: token ids.

        Returns:
            per target (logprob, rank, top_ids, top_logprobs).
        """
        block, axis = self.spec.prefill_block, 1 - self.spec.feature_axis
        extended = any(adapter.layout.vocab is not None for adapter in seq.adapters)
        program, vocab = self.programs.get("logprobs", extended), None
        if extended and self.rows.extra is not None:
            mix_SX = np.zeros((block, self.rows.num_slots), np.float32)
            for adapter, scale in zip(seq.adapters, seq.adapter_scales, strict=True):
                mix_SX[:, self.rows.slot_of(adapter)] = scale
            no_prompt = np.zeros(0, np.int32)
            vocab = VocabInputs(self.pool, self.rows.extra.vocab, *self._put((mix_SX, no_prompt)))
        result: list[tuple[Any, ...]] = []
        for first in range(0, len(targets), block):
            part = targets[first : first + block]
            indices = np.minimum(start + first + np.arange(block), hidden.shape[axis] - 1)
            ids = np.zeros(block, np.int32)
            ids[: len(part)] = part
            taken = np.ascontiguousarray(np.take(hidden, indices, axis))
            arrays = self._put((taken, ids, np.full(block, seq.vocab_size, np.int32)))
            values = program(self.params["top"], *arrays, vocab)
            result += list(zip(*(np.asarray(v)[: len(part)] for v in values), strict=True))
        return result

    def _run(
        self,
        batch: ForwardBatch,
        shape: BatchShape,
        rows: int,
        reach: Reach,
        make_edits: Callable[[], SamplingEdits | None],
        own_rows: int = 0,
    ) -> StepOutput:
        # As it is: a program takes a numpy array in a few microseconds, a transfer before it costs hundreds.
        flat_N, lora, extended = pack(batch), None, reach is Reach.EXTENDED
        if rows and self.rows.tables is not None:
            lora = replace(self.rows.tables, extra=self.rows.extra if extended else None)
        top, programs, pool = self.params["top"], self.programs, self.pool if extended else None
        begin = programs.get("begin", shape, rows, extended)
        x, inputs, sampling, mixes = begin(top, flat_N, self._sampled_S, lora, pool)
        layers = programs.get(*layers_key(shape, rows, reach, own_rows))
        buffers: Any = self.rows.layers_for(reach) if rows else [None] * self.spec.config.num_layers
        for weights, where, first in self._parts[programs.layers_at_once(shape)]:
            own = buffers if isinstance(buffers, UnitTable) else buffers[where]
            x, self.pool = layers(weights, own, self.pool, first, x, inputs)
        edits = make_edits()  # worked out while the device runs the layers
        extra = lora and lora.extra
        arguments = top, x, sampling, extra and VocabInputs(self.pool, extra.vocab, *mixes)
        if edits is None:
            output = programs.get("finish", shape, extended)(*arguments)
        else:
            output = programs.get("finish_edited", shape, extended)(*arguments, self._put_edits(edits))
        self._sampled_S = output.token_S
        return output

    def _put_edits(self, edits: SamplingEdits) -> SamplingEdits:
        """Edits on the device; of masks and entries, what this step has none of is there already."""
        num_rows = len(edits.masked_S)
        nothing = self._no_edits.get(num_rows)
        if nothing is None:
            nothing = self._no_edits[num_rows] = self._put(empty_edits(num_rows, self.spec))
        names = [name for name in vars(edits) if name.endswith("_E")] if edits.num_entries else []
        names += ["masked_S", "mask_SW"] if np.any(edits.masked_S) else []
        return replace(nothing, **{name: getattr(edits, name) for name in ["num_entries", *names]})

    def _plain(self, rows: int) -> list[Reach]:
        """The kinds of plain programs of layers for so many rank rows."""
        if not rows:
            return [Reach.ATTENTION]
        both = self.on_cpu and not self.spec.in_place
        return [Reach.ATTENTION, Reach.PROJECTIONS] if both else [Reach.PROJECTIONS]

    def plain_layers(self, shape: BatchShape, rows: int) -> list[tuple[Any, ...]]:
        """Keys of all plain programs of layers of a size."""
        sizes = [0, *self.own_rows.sizes(rows)]
        return [layers_key(shape, rows, reach, own_rows) for reach in self._plain(rows) for own_rows in sizes]

    def _put(self, tree: Any) -> Any:
        if self.programs.hosts is not None:
            return self.programs.hosts.put(tree)
        return place(tree, NamedSharding(self.mesh, P()))
