"""One engine of `bench adapters --cold`: its adapters, warm and cold, and what is measured on it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from multilora_jax.bench.adapter_set import register
from multilora_jax.bench.runs import random_prompts, run_once
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import UserError
from multilora_jax.lora.reader import SlowStorage
from multilora_jax.request import LoRARequest, SamplingParams


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        cold_requests: cold adapters, each asked for once per loop; cold_rank: their rank, on all seven projections.
        gap_steps: steps measured before and after the load that streams meet.
        disk_mib_per_s, disk_latency_ms: of the emulated disk, 0 for as fast as the machine's own.
        backlog: requests that wait behind a full batch.
        num_prompts: requests of one loop: behind a full batch, at least two for each cold one.
        input_len, output_len: tokens of each prompt and of each answer.
        rounds: timed loops of each engine.
    """

    cold_requests: int
    cold_rank: int
    gap_steps: int
    disk_mib_per_s: float
    disk_latency_ms: float
    backlog: int
    num_prompts: int
    input_len: int
    output_len: int
    rounds: int

    @property
    def throttled(self) -> bool:
        return self.disk_mib_per_s > 0 or self.disk_latency_ms > 0

    @property
    def disk(self) -> str:
        """What the disk is, in words."""
        if not self.throttled:
            return "not throttled: this machine's own, which keeps files it has read in memory"
        speed = f"{self.disk_mib_per_s:g} MiB/s" if self.disk_mib_per_s else "no limit of speed"
        return f"EMULATED, the delay is made up: {speed} and {self.disk_latency_ms:g} ms for each adapter"

    @property
    def most_load_steps(self) -> int:
        """Steps that a load beside streams may take."""
        return 2 * self.gap_steps

    @property
    def stream_len(self) -> int:
        """Tokens of a stream: its prompt, two steps to begin with, the quiet steps and those of the load."""
        return self.input_len + 2 + 2 * self.gap_steps + self.most_load_steps + 1


@dataclass
class Gaps:
    """Seconds between the tokens of streams.

    Attributes:
        quiet: before and after a load; loading: while it was under way.
        load_s: from the request for the adapter until the end of the first step that it ran in.
    """

    quiet: list[float] = field(default_factory=list)
    loading: list[float] = field(default_factory=list)
    load_s: float = 0.0


@dataclass
class Results:
    """Of one engine: times to the first token over all rounds, and the gaps of each round."""

    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    gaps: list[Gaps] = field(default_factory=list)


class ColdBench:
    """One engine and what was measured on it.

    Args:
        config: of the engine.
        work: the workload.
        warm, cold: folders of the adapters.

    Attributes:
        engine: the engine.
        results: grow with every call.
    """

    def __init__(self, config: EngineConfig, work: Workload, warm: Sequence[str], cold: Sequence[str]):
        self.work = work
        self.results = Results()
        self._slow = SlowStorage(work.disk_mib_per_s * 2**20 or None, work.disk_latency_ms / 1000)
        self._emulate = False
        self._last_step = 0.0
        self.engine = LLMEngine(config, throttle=self._throttle)
        self.engine.warm_up()
        self._warm, self._cold = register(self.engine, warm), register(self.engine, cold)
        self._prompts = random_prompts(self.engine, work.num_prompts, work.input_len)
        self._ids: Iterator[str] = (f"bench-{n}" for n in itertools.count())
        self._emulate = work.throttled

    def loop(self, *, timed: bool) -> None:
        """Requests for warm adapters, some for cold ones among them."""
        work = self.work
        self._cool_down()
        chosen = [self._warm[i % len(self._warm)] for i in range(work.num_prompts)]
        first = self.engine.config.max_num_seqs  # those before find a seat at once
        stride = (work.num_prompts - first) / work.cold_requests
        places = [first + int((i + 0.5) * stride) for i in range(work.cold_requests)]
        for place, lora in zip(places, self._cold, strict=True):
            chosen[place] = lora
        run = run_once(self.engine, self._prompts, chosen, work.output_len, self._ids, backlog=work.backlog)
        if timed:
            self.results.cold_s += [run.first_token_s[place] for place in places]
            self.results.warm_s += [run.first_token_s[place - 1] for place in places]

    def stream_through_a_load(self, number: int) -> None:
        """A batch of streams that a request on a cold adapter joins, from its arrival to its first token.

        Its prompt is one token, which runs as a decode row: what a longer prompt costs the streams has nothing to do
        with the load.
        """
        self._cool_down()
        engine, work = self.engine, self.work
        lora = self._cold[number % len(self._cold)]
        [adapter] = [adapter for adapter in engine.list_loras() if adapter.name == lora.lora_name]
        warm = self._warm[: max(1, engine.config.max_num_seqs - 1)]  # a seat is left for the cold one
        streams = [next(self._ids) for _ in warm]
        for request_id, stream in zip(streams, warm, strict=True):
            self._add(request_id, self._prompts[0], stream, work.stream_len - work.input_len)
        while engine.stats().num_waiting:
            engine.step()
        for _ in range(2):  # prompts may be under way still
            self._gap()
        gaps = Gaps([self._gap() for _ in range(work.gap_steps)])
        last = next(self._ids)
        start = time.perf_counter()
        self._add(last, self._prompts[0][:1], lora, 2)
        while not engine.stats().running_by_adapter.get(adapter.name):
            if len(gaps.loading) >= work.most_load_steps:
                raise UserError(
                    f"a cold adapter was not loaded within {work.most_load_steps} steps of the streams: raise "
                    "--gap-steps, or make the emulated disk faster",
                    reason="load_too_slow", param="gap_steps",
                )  # fmt: skip
            gaps.loading.append(self._gap())
        gaps.load_s = time.perf_counter() - start
        gaps.loading.append(self._gap())  # and a step that it runs in
        gaps.quiet += [self._gap() for _ in range(work.gap_steps)]
        for request_id in (*streams, last):
            engine.abort_request(request_id)
        self.results.gaps.append(gaps)

    def _add(self, request_id: str, prompt: list[int], lora: LoRARequest, max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(request_id, prompt, params, lora)

    def _gap(self) -> float:
        """Runs one step, which gives each running stream a token; seconds since the one before."""
        self.engine.step()
        before, self._last_step = self._last_step, time.perf_counter()
        return self._last_step - before

    def _cool_down(self) -> None:
        """Takes the cold adapters out of the pool and out of host memory."""
        engine, names = self.engine, {lora.lora_name for lora in self._cold}
        for adapter in engine.list_loras():
            if adapter.name in names:
                if engine.cache.is_resident(adapter):
                    engine.cache.order.evict([adapter])
                engine.adapters.host.remove(adapter)

    def _throttle(self, num_bytes: int) -> float:
        return self._slow(num_bytes) if self._emulate else 0.0
