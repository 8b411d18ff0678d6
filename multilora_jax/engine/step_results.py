"""Steps that were launched, and what becomes of their results when they are read."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from multilora_jax.engine.adapter_manager import AdapterManager
from multilora_jax.engine.batch import BuiltBatch
from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine.model_runner import ModelRunner
from multilora_jax.engine.output import RequestState
from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.errors import StepFailedError
from multilora_jax.models.sampler import StepOutput
from multilora_jax.request import RequestOutput, Sequence

log = logging.getLogger(__name__)


@dataclass
class LaunchedStep:
    """A step whose results are on their way.

    Attributes:
        plan, built: what was run.
        output: on the device.
        start_s: time.perf_counter() when its planning began.
    """

    plan: ScheduledStep
    built: BuiltBatch
    output: StepOutput
    start_s: float

    def __post_init__(self) -> None:
        """Books what the step will have done: the next one is planned on that."""
        self.launched_s = time.perf_counter()
        for seq in self.plan.decodes:
            seq.num_computed_tokens += 1
        for seq, _, count in self.built.chunks:
            seq.num_computed_tokens += count
        for seq, row in self.built.rows:
            seq.num_in_flight += 1
            seq.sampled_row = row


class StepResults:
    """Reads launched steps, each once and in their order, and turns them into outputs.

    Args:
        runner, scheduler, adapters: of the engine.
        requests: its live sequences by id, from which those that end are taken.
        stats: its counters.
        books: its lock.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        adapters: AdapterManager,
        requests: dict[str, RequestState],
        stats: EngineStats,
        books: threading.Lock,
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._adapters = adapters
        self._requests = requests
        self._stats = stats
        self._books = books
        self._last_read_s = 0.0

    def must_be_read(self, step: LaunchedStep) -> bool:
        """Whether no step can be planned before this one is read.

        So it is where the host has to see a token before the next can be asked for: penalties, grammars and other
        edits of logits, and proposals. (Prompt log-probabilities take the row buffers as the step left them.)
        """
        return any(seq.sampling_state is not None or seq.lookup is not None for seq, _ in step.built.rows) or any(
            state.wants_prompt_logprobs for seq, _, _ in step.built.chunks if (state := self._state(seq))
        )

    def concerns_anybody(self, step: LaunchedStep) -> bool:
        """Whether a sequence of the step is still live."""
        return any(map(self._state, step.plan.sequences))

    def fail_waiting(self) -> list[RequestOutput]:
        """Ends the requests whose adapter could not be read again, and those that the policy gives up."""
        given_up = dict(self._scheduler.given_up())
        self._scheduler.refused.update(error.reason for seq, error in given_up.items() if not seq.index)
        failed = dict(self._adapters.failed_sequences()) | given_up
        return [self.fail(seq, error) for seq, error in failed.items()]

    def fail(self, seq: Sequence, error: Exception) -> RequestOutput:
        """Ends a live sequence with an error; its last output. Call it with the lock held."""
        state = self._requests[seq.request_id]
        state.fail(error)
        self._end(state)
        return state.output(time.monotonic())

    def read(self, step: LaunchedStep) -> list[RequestOutput]:
        """Waits for a step; the outputs of the sequences that got a token, those ended meanwhile left out."""
        asked_s = time.perf_counter()
        plan, built, output = step.plan, step.built, step.output
        wants = [chunk for chunk in built.chunks if (state := self._state(chunk[0])) and state.wants_prompt_logprobs]
        hidden = np.asarray(output.hidden) if wants else None
        tokens = np.asarray(output.token_S)
        logprobs = None
        if any(seq.params.logprobs is not None for seq, _ in built.rows):
            arrays = (output.logprob_S, output.rank_S, output.top_ids_SK, output.top_logprobs_SK)
            logprobs = [np.asarray(a) for a in arrays]
        now, read_s = time.monotonic(), time.perf_counter()
        seconds, self._last_read_s = read_s - max(step.start_s, self._last_read_s), read_s
        outputs: list[RequestOutput] = []
        with self._books:
            if hidden is not None:
                for seq, first, count in wants:
                    self._take_prompt_logprobs(seq, hidden, first, count)
            for seq, row in built.rows:
                seq.num_in_flight -= 1
                state = self._state(seq)
                if state is not None:
                    proposed = plan.proposals.get(seq, [])
                    try:
                        self._append(state, proposed, tokens, row, logprobs, now)
                        outputs.append(state.output(now))
                    except Exception as error:  # of one request's text or grammar: no other's business
                        log.exception("the token of request %r could not be taken", seq.request_id)
                        outputs.append(self.fail(seq, StepFailedError.of(error)))
            self._scheduler.saw_step(plan, seconds)
        num_tokens = len(plan.decodes) + sum(count for _, _, count in built.chunks)
        phases = (step.launched_s - step.start_s, read_s - asked_s, time.perf_counter() - read_s)
        self._stats.add_step(seconds, num_tokens, phases)
        self._runner.rows.saw_step(seconds, plan.num_prompt_tokens)
        return outputs

    def _state(self, seq: Sequence) -> RequestState | None:
        """Of a sequence that is live: its id alone may be another's by now."""
        state = self._requests.get(seq.request_id)
        return state if state is not None and state.seq is seq else None

    def _append(
        self,
        state: RequestState,
        proposed: list[int],
        tokens: np.ndarray,
        row: int,
        logprobs: list[np.ndarray] | None,
        now: float,
    ) -> None:
        """Takes the token of a row, and those of the rows behind it as far as the proposals came true."""
        seq, kept = state.seq, 0
        if seq.first_token_time is None and not seq.index:  # the prompt counts once, here
            self._stats.prompt_tokens += seq.num_prompt_tokens
        for kept, token in enumerate(tokens[row : row + 1 + len(proposed)].tolist()):
            state.append(token, now, None if logprobs is None else [a[row + kept] for a in logprobs])
            if state.finish_reason is not None or token not in proposed[kept : kept + 1]:
                break
        seq.num_computed_tokens += kept
        self._stats.add_tokens(seq, len(proposed), kept)
        if state.finish_reason is not None:
            self._end(state)

    def _end(self, state: RequestState) -> None:
        """Takes a sequence that has its finish_reason out of the books."""
        assert state.finish_reason is not None
        self._scheduler.finish(state.seq, state.finish_reason)
        del self._requests[state.seq.request_id]
        self._adapters.leave(state.seq)

    def _take_prompt_logprobs(self, seq: Sequence, hidden: np.ndarray, first: int, count: int) -> None:
        """Records ln p of the prompt tokens that follow a chunk's positions and are not recorded yet."""
        state, start = self._requests[seq.request_id], seq.num_computed_tokens - count
        recorded: Any = state.prompt_logprobs or ()
        begin, end = max(start + 1, len(recorded)), min(start + 1 + count, seq.num_prompt_tokens)
        if begin < end:
            offset = first + begin - 1 - start
            found = self._runner.prompt_logprobs(seq, hidden, offset, seq.token_ids[begin:end])
            state.add_prompt_logprobs(found, begin)
