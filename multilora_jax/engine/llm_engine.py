"""The engine: takes requests, steps the device, gives outputs back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from multilora_jax.config import EngineConfig
from multilora_jax.engine.adapter_manager import AdapterManager
from multilora_jax.engine.describe import describe
from multilora_jax.engine.fanout import Fanout
from multilora_jax.engine.inputs import Mix, Prompt, continues_text
from multilora_jax.engine.interrupts import defer_interrupts
from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine.output import RequestState
from multilora_jax.engine.policies import PolicyConfig, make_policy
from multilora_jax.engine.recovery import Recovery
from multilora_jax.engine.sampling_plans import SamplingPlans
from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.engine.start import load_model
from multilora_jax.engine.step_results import LaunchedStep, StepResults
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.lora.config import PeftConfig
from multilora_jax.memory.allocator import PageAllocator
from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams, Sequence
from multilora_jax.tokenizer import Tokenizer

Throttle = Callable[[int], float] | None
_LOAD_WAIT_S = 0.02  # longest sleep of a step that has nothing to run because every request waits for its adapter


class LLMEngine:
    """One base model, its adapters and its pool.

    `add_request`, `abort_request` and `step` are called from one thread; `add_lora`, `remove_lora`, `list_loras` and
    `lora_request` from any.

    Args:
        config: see EngineConfig.
        progress: show progress bars while loading and compiling.
        throttle: emulates slow storage of adapters, see SlowStorage.
        replica: which of the server's data_parallel_size it is; -1: the only one.

    Raises:
        ConfigError, NotFoundError: the model or an adapter cannot be served.
    """

    def __init__(self, config: EngineConfig, *, progress: bool = True, throttle: Throttle = None, replica: int = -1):
        self.config = config
        self.base_name = config.base_name
        self._progress = progress
        parts = load_model(config, progress=progress, replica=replica)
        self.model_config, self.geometry, self.max_model_len = parts.model_config, parts.geometry, parts.max_model_len
        self.tokenizer, self.runner = parts.tokenizer, parts.runner
        self.allocator = PageAllocator(self.geometry.num_pages)
        self.cache: AdapterCache[Adapter] = AdapterCache(
            self.allocator, config.max_adapter_pages, policy=config.lora_eviction_policy
        )
        kv = KVManager(self.allocator, self.geometry, self.cache)
        self.prefix = kv.prefix
        policy = make_policy(PolicyConfig.of(config))
        self.scheduler = Scheduler(parts.scheduling, self.allocator, kv, self.cache, policy)
        self._fanout = Fanout(kv, self.geometry.page_tokens, caches=config.enable_prefix_caching)
        # Guards the host's books: an unload from another thread must not meet a step that is being planned.
        self._books = threading.Lock()
        self.adapters = AdapterManager(
            config, self.model_config, self.geometry, self.runner.base_tensors(), self.tokenizer,
            self.cache, self.scheduler, self._books, forget=self.runner.rows.forget,
            read_back=self.runner.read_pages, throttle=throttle, shares_cores=self.runner.on_cpu,
        )  # fmt: skip
        self.scheduler.active.is_staged = lambda a: self.scheduler.was_idle or self.runner.rows.holds(a)
        self._requests: dict[str, RequestState] = {}
        self.plans = SamplingPlans(self.config, self.model_config, self.adapters.text, self.max_model_len)
        self._seeds = np.random.default_rng(config.seed)
        self._stats = EngineStats()
        self._results = StepResults(
            self.runner, self.scheduler, self.adapters, self._requests, self._stats, self._books
        )
        self._recovery = Recovery(self.runner, self.scheduler, self.adapters, self._results)
        self._launched: LaunchedStep | None = None
        self._outputs: list[RequestOutput] = []
        on_cpu, ahead = self.runner.on_cpu, config.async_scheduling
        self._runs_ahead = not on_cpu if ahead is None else ahead
        self._compiled_at_warm_up = 0

    # Adapters

    def add_lora(self, request: LoRARequest, *, pinned: bool = False) -> Adapter:
        """Reads, checks and packs an adapter and registers it; see AdapterRegistry.load.

        Args:
            request: with a path.
            pinned: bring it into the pool and keep it there; refused, and nothing loaded, where there is no room.
        """
        return self.adapters.load(request, pinned=pinned)

    def register_lora(self, request: LoRARequest) -> Adapter:
        """Gives an adapter a name; its files are read when a request first wants it."""
        return self.adapters.register(request)

    def add_adapter(
        self,
        name: str,
        params: Mapping[str, Any],
        config: PeftConfig | Mapping[str, Any] | None = None,
        *,
        int_id: int | None = None,
        load_inplace: bool = False,
    ) -> Adapter:
        """Registers an adapter from arrays, as a training loop has them: no file is written or read.

        Args:
            name: unique among adapters, unless load_inplace replaces one.
            params: a pytree or flat mapping of JAX or numpy arrays; see `LLM.add_adapter` for names, layouts, and an
                example.
            config: PEFT's settings; lora_alpha is required, r is not where all modules have one rank.
            int_id: its id; the next free one by default.

        Returns:
            The adapter; its digest is that of the arrays and of the settings.

        Raises:
            UserError, AdapterError: as `add_lora`; see `weights_from_arrays`.
        """
        return self.adapters.add(name, params, config, int_id=int_id, load_inplace=load_inplace)

    def remove_lora(self, lora: str | int) -> None:
        """Forgets an adapter, by name or id: new requests get NotFoundError, those under way finish, then its memory
        comes free."""
        self.adapters.remove(self.adapters.name_of(lora))

    def pin_lora(self, lora: str | int) -> None:
        """Keeps an adapter, by name or id, in the pool; see AdapterManager.pin. `unpin_lora` undoes it."""
        self.adapters.pin(self.adapters.name_of(lora))

    def unpin_lora(self, lora: str | int) -> None:
        """Undoes `pin_lora`."""
        self.adapters.unpin(self.adapters.name_of(lora))

    def prepare(self, requests: Iterable[LoRARequest]) -> None:
        """Loads, in parallel, what the requests name and was never loaded; blocks. Raises for the first bad one."""
        self.adapters.prepare(requests)

    def list_loras(self) -> list[Adapter]:
        """Registered adapters in the order of their registration."""
        return self.adapters.registry.list()

    def adapter_states(self) -> dict[str, str]:
        """Where the adapter of each name is: "registered" (on disk only), "host", "loading" or "resident"."""
        return self.adapters.states()

    def lora_request(self, name: str) -> LoRARequest:
        """The LoRARequest of a registered name; NotFoundError names the closest."""
        adapter = self.adapters.registry.get(name)
        return LoRARequest(name, adapter.int_id, adapter.path)

    def tokenizer_for(self, lora_request: Mix) -> Tokenizer | None:
        """The tokenizer of requests on these adapters; they are loaded if they never were."""
        return self.adapters.text.tokenizer_for(self.adapters.resolve(lora_request)[0])

    def chat_template_for(self, lora_request: Mix) -> str | None:
        """The chat template that one of these adapters brings, None for the base's."""
        return self.adapters.text.chat_template_for(self.adapters.resolve(lora_request)[0])

    def vocab_limit(self, lora_request: Mix) -> int:
        """Token ids below it exist for requests on these adapters."""
        return self.adapters.text.vocab_size(self.adapters.resolve(lora_request)[0])

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: Mix = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queues a request.

        Args:
            request_id: unique among live requests.
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            params: sampling parameters; max_tokens None means up to the context's end.
            lora_request: the adapter; a list of several, each with its scale, for their weighted sum; None: the base.
            priority: lower runs earlier.
            cache_salt: only requests of the same salt share cached prefixes.
            tenant: whom its use counts for where shares are counted by tenant; by default its salt or its adapter.
            arrival_time: time.monotonic() seconds that a first-token objective counts from; now by default.

        Raises:
            UserError: bad input, named; nothing was changed.
            RateLimitError: the queue is full, or its adapter gets more requests than it may; nothing was changed.
        """
        self._recovery.check_alive()
        adapters, scales = self.adapters.resolve(lora_request)
        inputs = self.plans.inputs_for(adapters)
        text, token_ids = inputs.read_prompt(prompt)
        inputs.check_priority(priority)
        salt = inputs.read_salt(prompt, cache_salt)
        tenant = inputs.check_tenant(tenant)
        params = inputs.check_params(params)
        plan, room = self.plans.plan(params, inputs), self.max_model_len - len(token_ids)
        seq = Sequence(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            params=params,
            adapters=adapters,
            adapter_scales=scales,
            vocab_size=inputs.vocab_size,
            eos_token_ids=frozenset() if params.ignore_eos else inputs.eos_token_ids,
            max_total_tokens=len(token_ids) + (room if params.max_tokens is None else min(params.max_tokens, room)),
            priority=priority,
            seed=int(self._seeds.integers(2**63)) if params.seed is None else params.seed & (2**64 - 1),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            tenant=(tenant or salt or "") if self.config.fair_by == "tenant" else "",
        )
        with self._books:
            sequences = self._fanout.sequences(seq, salt, self._requests)
            for child in sequences:
                child.sampling_state = plan and plan.start(token_ids)
                child.lookup = self.plans.lookup(params)
                self.scheduler.add(child, None if child is seq else seq)
                self.adapters.enter(child)
                self._requests[child.request_id] = RequestState(
                    child, text, lora_request, inputs.tokenizer, continues_text=continues_text(prompt)
                )
            self._fanout.enter(request_id, sequences)

    def abort_request(self, request_id: str) -> bool:
        """Ends a live request; its pages are free when this returns. False if the id is not live."""
        with self._books:
            states = [self._requests.pop(member, None) for member in self._fanout.members(request_id)]
            for state in filter(None, states):
                self.scheduler.abort(state.seq.request_id)
                self.adapters.leave(state.seq)
            self._fanout.leave(request_id)
            return any(states)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work."""
        return bool(self._requests) or self.adapters.has_transfers

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs, cumulative, of the requests that got a token or ended.

        Where steps run ahead (`async_scheduling`) the next one is on its way when this returns.

        Raises:
            UnavailableError: an earlier step failed (`engine_failed`), and `recover` was not called.
        """
        self._recovery.check_alive()
        with defer_interrupts():
            try:
                self._step()
                return self._take_outputs()
            except BaseException as error:
                self._recovery.failure = error
                raise

    def recover(self) -> list[RequestOutput]:
        """Goes on after a failed `step`, whose outputs it returns: see Recovery."""
        if self._recovery.failure is not None:
            self._launched = None
            self._stats.failed_steps += 1
            with self._books:
                self._outputs += self._recovery.recover()
        return self._take_outputs()

    def _take_outputs(self) -> list[RequestOutput]:
        merged = self._fanout.merge(self._outputs, self.abort_request)
        self._outputs = []
        return merged

    def _step(self) -> None:
        if self._launched is None:
            self._launch()
        step, self._launched = self._launched, None
        if step is None:
            if not self._outputs and (self.scheduler.waits_for_loads or self.adapters.has_transfers):
                self.adapters.reader.wait(_LOAD_WAIT_S)  # whatever there is to do waits for an adapter's files
            return
        if self._runs_ahead and not self._results.must_be_read(step):
            self._launch()
        self._recovery.running(step.plan, self._launched and self._launched.plan)
        self._outputs += self._results.read(step)
        self._recovery.passed(step)
        if self._launched is not None and not self._results.concerns_anybody(self._launched):
            self._launched = None

    def _launch(self) -> None:
        """Plans a step and puts it on its way, if there is one."""
        start = time.perf_counter()
        with self._books:
            self._recovery.planning()
            self._outputs += self._results.fail_waiting()
            self.runner.write_pages(self._recovery.writing(self.adapters.before_step()))
            transfers = self.adapters.transfers
            if self.scheduler.num_running:
                self.runner.stage(*transfers.to_stage(), self.cache.pages_of, transfers.empty_seats)
            plan = self.scheduler.schedule()
            if plan is not None:
                plan.ahead = transfers.to_stage()[1] if plan.after_idle else []
                self._recovery.running(plan)
                self._launched = LaunchedStep(plan, *self.runner.execute(plan, self.cache.pages_of), start)

    # Start and figures

    def warm_up(self) -> None:
        """Compiles everything a step can need; afterwards nothing compiles."""
        self.runner.warm_up(progress=self._progress)
        self._compiled_at_warm_up = self.runner.num_compilations

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges; call it between steps."""
        with self._books:
            s = self._stats
            s.read(self.scheduler, self.allocator, self.prefix, (state.seq for state in self._requests.values()))
            self.adapters.fill(s)
            s.adapter_load_bytes = self.runner.loaded_bytes
            s.compilations = self.runner.num_compilations - self._compiled_at_warm_up
            s.attention_backend, s.lora_backend = self.runner.spec.attention_backend, self.runner.spec.lora_backend
            return EngineStats(**vars(s))

    def check_integrity(self) -> None:
        """Proves that every page is accounted for; see Scheduler.check_integrity."""
        with self._books:
            self.scheduler.check_integrity()

    def describe(self) -> str:
        """The start-up banner: model, pool, adapters."""
        config, ahead = self.config, "steps run ahead" if self._runs_ahead else ""
        lookup = f"prompt lookup of {config.prompt_lookup_tokens} tokens" if config.prompt_lookup_tokens else ""
        weights = f"weights in {rounded}" if (rounded := self.runner.spec.quantization) else ""
        options = [weights, self.runner.spec.kernels, ahead, lookup]
        return describe(
            self.base_name, self.model_config, self.geometry, self.max_model_len, self.list_loras(),
            [option for option in options if option],
        )  # fmt: skip
