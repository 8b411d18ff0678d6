"""The engine: takes requests, steps the device, gives outputs back."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from multilora_jax.config import EngineConfig
from multilora_jax.engine import devices
from multilora_jax.engine.describe import describe
from multilora_jax.engine.host_memory import release_freed_memory
from multilora_jax.engine.inputs import InputReader, Prompt, continues_text
from multilora_jax.engine.interrupts import defer_interrupts
from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine.model_runner import ModelRunner
from multilora_jax.engine.output import RequestState
from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.engine.step_plan import SchedulerConfig
from multilora_jax.errors import UnavailableError, UserError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.lora.packing import HostAdapter
from multilora_jax.lora.registry import AdapterRegistry
from multilora_jax.memory.allocator import PageAllocator, PageKind
from multilora_jax.models.checkpoint import open_checkpoint, read_config
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import load_llama
from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams, Sequence, SequenceStatus
from multilora_jax.tokenizer import Tokenizer


class LLMEngine:
    """One base model, its adapters and its pool.

    `add_request`, `abort_request` and `step` are called from one thread; `add_lora`, `remove_lora`, `list_loras` and
    `lora_request` from any.

    Args:
        config: see EngineConfig.
        progress: show progress bars while loading and compiling.

    Raises:
        ConfigError, NotFoundError: the model or an adapter cannot be served.
    """

    def __init__(self, config: EngineConfig, *, progress: bool = True):
        self.config = config
        self.base_name = config.base_name
        self._progress = progress
        devices.set_compilation_cache(config.compilation_cache_dir)
        mesh = devices.make_mesh(config.tensor_parallel_size)
        dummy = config.load_format == "dummy"
        checkpoint = None if dummy else open_checkpoint(config.model, progress=progress)
        self.model_config = read_config(Path(config.model)) if checkpoint is None else checkpoint.config
        self.tokenizer = self._load_tokenizer(checkpoint)
        self.max_model_len = devices.max_model_len(config, self.model_config)
        dtype = devices.choose_dtype(config.dtype)
        num_pages = devices.pool_pages(config, self.model_config, dtype, self.max_model_len, mesh)
        tp = config.tensor_parallel_size
        self.geometry = self.model_config.geometry(num_pages, config.page_tokens, tp, dtype)
        spec = LlamaSpec(
            self.model_config, self.geometry, config.prefill_block, devices.features_first(dtype),
            "model" if tp > 1 else None,
        )  # fmt: skip
        model = load_llama(
            spec, self.max_model_len, mesh, checkpoint, seed=config.seed,
            progress=lambda layers: tqdm(layers, desc="Loading", unit="layer", disable=not progress),
        )  # fmt: skip
        release_freed_memory()  # what reading the checkpoint took
        scheduling = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_block=config.prefill_block,
            max_rank_rows=config.max_rank_rows,
            max_loras=config.max_loras,
        )
        self.runner = ModelRunner(
            model,
            mesh,
            max_num_seqs=config.max_num_seqs,
            max_blocks=scheduling.max_prefill_blocks,
            max_model_len=self.max_model_len,
            max_rank_rows=config.max_rank_rows if config.enable_lora else 0,
        )
        self.allocator = PageAllocator(num_pages)
        self.cache: AdapterCache[HostAdapter] = AdapterCache(self.allocator, config.max_adapter_pages)
        self.scheduler = Scheduler(
            scheduling, self.allocator, KVManager(self.allocator, self.geometry, self.cache), self.cache
        )
        self.registry = AdapterRegistry(
            self.model_config,
            self.geometry,
            config.max_lora_rank,
            config.adapter_roots,
            base_names=[self.base_name],
            check=self.scheduler.check_adapter,
            on_replaced=self._retire,
        )
        # Guards the host's books: an unload from another thread must not meet a step that is being planned.
        self._books = threading.Lock()
        self._requests: dict[str, RequestState] = {}
        self._users: Counter[HostAdapter] = Counter()
        self._retired: weakref.WeakSet[HostAdapter] = weakref.WeakSet()
        self._inputs = InputReader(self.model_config, self.tokenizer, self.max_model_len)
        self._seeds = np.random.default_rng(config.seed)
        self._stats = EngineStats()
        self._failure: BaseException | None = None
        self._compiled_at_warm_up = 0
        for int_id, (name, path) in enumerate(config.lora_modules.items(), 1):
            self.registry.load(LoRARequest(name, int_id, path), trusted=True)

    def _load_tokenizer(self, checkpoint: Any) -> Tokenizer | None:
        if checkpoint is not None:
            tokenizer = checkpoint.load_tokenizer(self.config.tokenizer)
        else:
            tokenizer = Tokenizer.from_folder(self.config.tokenizer or self.config.model)
        return tokenizer

    # Adapters

    def add_lora(self, request: LoRARequest) -> HostAdapter:
        """Reads, checks and packs an adapter on the caller's thread and registers it; see AdapterRegistry.load."""
        self._check_lora_enabled()
        return self.registry.load(request)

    def remove_lora(self, name: str) -> None:
        """Forgets an adapter: new requests get NotFoundError, those under way finish, then its pages come free."""
        self._retire(self.registry.remove(name))

    def list_loras(self) -> list[HostAdapter]:
        """Registered adapters in the order of their registration."""
        return self.registry.list()

    def lora_request(self, name: str) -> LoRARequest:
        """The LoRARequest of a registered name; NotFoundError names the closest."""
        adapter = self.registry.get(name)
        return LoRARequest(adapter.name, adapter.int_id, adapter.path)

    def _check_lora_enabled(self) -> None:
        if not self.config.enable_lora:
            raise UserError(
                "this server runs without adapters (enable_lora is false)", reason="lora_disabled", param="model"
            )

    def _retire(self, adapter: HostAdapter) -> None:
        with self._books:
            self._retired.add(adapter)
            self.cache.drop(adapter)
            self._forget_if_unused(adapter)

    def _forget_if_unused(self, adapter: HostAdapter) -> None:
        if adapter in self._retired and adapter not in self._users:
            self.runner.rank_rows.forget(adapter)

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Queues a request.

        Args:
            request_id: unique among live requests.
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            params: sampling parameters; max_tokens None means up to the context's end.
            lora_request: the adapter, None for the base.
            priority: lower runs earlier.

        Raises:
            UserError: bad input, named; nothing was changed.
        """
        self._check_alive()
        text, token_ids = self._inputs.read_prompt(prompt)
        self._inputs.check_params(params)
        self._inputs.check_priority(priority)
        adapter = None
        if lora_request is not None:
            if not isinstance(lora_request, LoRARequest):
                raise UserError(
                    f"lora_request must be a LoRARequest, not {type(lora_request).__name__}",
                    reason="bad_lora_request", param="lora_request",
                )  # fmt: skip
            self._check_lora_enabled()
            adapter = self.registry.resolve(lora_request)
        room = self.max_model_len - len(token_ids)
        seq = Sequence(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            params=params,
            adapter=adapter,
            eos_token_ids=frozenset() if params.ignore_eos else self._inputs.eos_token_ids,
            max_total_tokens=len(token_ids) + (room if params.max_tokens is None else min(params.max_tokens, room)),
            priority=priority,
            seed=int(self._seeds.integers(2**63)) if params.seed is None else params.seed & (2**64 - 1),
        )
        with self._books:
            self.scheduler.add(seq)
            self._requests[request_id] = RequestState(
                seq, text, lora_request, self.tokenizer, continues_text=continues_text(prompt)
            )
            if adapter is not None:
                self._users[adapter] += 1

    def abort_request(self, request_id: str) -> bool:
        """Ends a live request; its pages are free when this returns. False if the id is not live."""
        with self._books:
            state = self._requests.pop(request_id, None)
            if state is None:
                return False
            self.scheduler.abort(request_id)
            self._leave(state)
            return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs, cumulative, of the requests that got a token or ended.

        Raises:
            UnavailableError: an earlier step failed (`engine_failed`), which may have left the pool half written.
        """
        self._check_alive()
        with defer_interrupts():
            try:
                return self._step()
            except BaseException as error:
                self._failure = error
                raise

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise UnavailableError(
                f"a step of this engine failed ({type(self._failure).__name__}: {self._failure}): build a new one",
                reason="engine_failed",
            )

    def _step(self) -> list[RequestOutput]:
        start = time.perf_counter()
        with self._books:
            plan = self.scheduler.schedule()
            if plan is None:
                return []
            self.runner.write_pages(self.cache.take_pending_writes())
            built, output = self.runner.execute(plan, self.cache.pages_of)
        wants = any(self._requests[s.request_id].wants_prompt_logprobs for s, _, _ in built.chunks)
        hidden = np.asarray(output.hidden) if wants else None
        tokens = np.asarray(output.token_S)
        logprobs = None
        if any(seq.params.logprobs is not None for seq, _ in built.rows):
            arrays = (output.logprob_S, output.rank_S, output.top_ids_SK, output.top_logprobs_SK)
            logprobs = [np.asarray(a) for a in arrays]
        now = time.monotonic()
        with self._books:
            for seq in plan.decodes:
                seq.num_computed_tokens += 1
            for seq, first, count in built.chunks:
                if hidden is not None and self._requests[seq.request_id].wants_prompt_logprobs:
                    self._take_prompt_logprobs(seq, hidden, first, count)
                seq.num_computed_tokens += count
            outputs = []
            for seq, row in built.rows:
                state = self._requests[seq.request_id]
                if seq.num_tokens == seq.num_prompt_tokens:  # its first token: the prompt counts once, here
                    self._stats.prompt_tokens += seq.num_prompt_tokens
                state.append(int(tokens[row]), now, None if logprobs is None else [a[row] for a in logprobs])
                self._stats.generation_tokens += 1
                if state.finish_reason is not None:
                    self.scheduler.finish(seq, state.finish_reason)
                    del self._requests[seq.request_id]
                    self._leave(state)
                outputs.append(state.output(now))
        self._stats.steps += 1
        self._stats.step_seconds += time.perf_counter() - start
        return outputs

    def _take_prompt_logprobs(self, seq: Sequence, hidden: np.ndarray, first: int, count: int) -> None:
        """Records ln p of the prompt tokens that follow a chunk's positions and are not recorded yet."""
        state = self._requests[seq.request_id]
        known = len(state.prompt_logprobs or ())
        begin, end = seq.num_computed_tokens + 1, seq.num_computed_tokens + count + 1
        begin, end = max(begin, known), min(end, seq.num_prompt_tokens)
        if begin < end:
            offset = first + begin - 1 - seq.num_computed_tokens
            state.add_prompt_logprobs(self.runner.prompt_logprobs(hidden, offset, seq.token_ids[begin:end]), begin)

    def _leave(self, state: RequestState) -> None:
        adapter = state.seq.adapter
        if adapter is not None:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]
            self._forget_if_unused(adapter)

    # Start and figures

    def warm_up(self) -> None:
        """Compiles everything a step can need; afterwards nothing compiles."""
        self.runner.warm_up(progress=self._progress)
        self._compiled_at_warm_up = self.runner.num_compilations

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges; call it between steps."""
        with self._books:
            s = self._stats
            s.num_running, s.num_waiting = self.scheduler.num_running, self.scheduler.num_waiting
            running: Counter[str] = Counter()
            waiting: Counter[str] = Counter()
            for state in self._requests.values():
                if state.seq.adapter is not None:
                    where = running if state.seq.status is SequenceStatus.RUNNING else waiting
                    where[state.seq.adapter.name] += 1
            s.running_by_adapter, s.waiting_by_adapter = dict(running), dict(waiting)
            a = self.allocator
            s.pages_total, s.pages_free = a.num_total, a.num_free
            s.pages_kv, s.pages_adapter = a.count(PageKind.KV), a.count(PageKind.ADAPTER)
            c = self.cache
            s.adapter_hits, s.adapter_misses = c.hits, c.misses
            s.adapter_loads, s.adapter_evictions = c.loads, c.evictions
            s.adapter_load_bytes = self.runner.loaded_bytes
            s.num_preemptions = self.scheduler.num_preemptions
            s.compilations = self.runner.num_compilations - self._compiled_at_warm_up
            s.resident = [(x.name, x.rank, c.is_pinned(x)) for x in c.residents()]
            return EngineStats(**vars(s))

    def check_integrity(self) -> None:
        """Proves that every page is accounted for; see Scheduler.check_integrity."""
        with self._books:
            self.scheduler.check_integrity()

    def describe(self) -> str:
        """The start-up banner: model, pool, adapters."""
        return describe(self.base_name, self.model_config, self.geometry, self.max_model_len, self.list_loras())
