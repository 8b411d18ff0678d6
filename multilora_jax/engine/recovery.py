"""What becomes of an engine after a failed step (host only, no jax).

A step may fail anywhere: while pages are handed out, in the middle of a copy, or on the device, which by then may have
taken the pool and not given it back. So nothing that the host noted about the device is believed any more. The books of
the pool are begun anew, every sequence that ran waits and is computed again as a preempted one is, adapters come back
from host memory or their files, and the pool itself is made again where it is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from multilora_jax.engine.adapter_manager import AdapterManager
from multilora_jax.engine.quarantine import Quarantine
from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.errors import StepFailedError, UnavailableError
from multilora_jax.lora.residency import PageWrite
from multilora_jax.request import RequestOutput, Sequence

if TYPE_CHECKING:
    from multilora_jax.engine.model_runner import ModelRunner
    from multilora_jax.engine.step_results import LaunchedStep, StepResults

log = logging.getLogger(__name__)


class Recovery:
    """Watches the steps of one engine for who is to blame, and puts the engine together again.

    Args:
        runner, scheduler, adapters, results: of the engine, whose lock its caller holds.

    Attributes:
        failure: of the last step; nothing may be run until `recover` has been called.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, adapters: AdapterManager, results: StepResults):
        self._runner = runner
        self._scheduler = scheduler
        self._adapters = adapters
        self._results = results
        self.failure: BaseException | None = None
        self._quarantine = Quarantine()
        self._plans: list[ScheduledStep] = []
        self._writes: Iterable[tuple[PageWrite, np.ndarray]] = ()

    def check_alive(self) -> None:
        """Raises UnavailableError (`engine_failed`) after a step that failed."""
        if self.failure is not None:
            raise UnavailableError(
                f"a step of this engine failed ({type(self.failure).__name__}: {self.failure}): build a new one",
                reason="engine_failed",
            )

    def planning(self) -> None:
        """A step is being planned: if that fails, whoever runs is to blame, else whoever waits."""
        self._plans, self._writes = [], ()
        self._scheduler.start_only(frozenset(self._quarantine.on_trial))

    def writing(self, writes: list[tuple[PageWrite, np.ndarray]]) -> list[tuple[PageWrite, np.ndarray]]:
        """These pages are being copied: whoever waits for their adapters is to blame."""
        self._writes = writes
        return writes

    def running(self, *plans: ScheduledStep | None) -> None:
        """These steps are being launched, or their results awaited: whoever is in them is to blame."""
        self._plans, self._writes = [plan for plan in plans if plan is not None], ()

    def passed(self, step: LaunchedStep) -> None:
        """The results of a step were read."""
        self._quarantine.passed(seq for seq, _ in step.built.rows)

    def _suspects(self) -> list[Sequence]:
        seqs = dict.fromkeys(seq for plan in self._plans for seq in plan.sequences)
        adapters = {write.adapter for write, _ in self._writes}
        waiting = list(self._scheduler.waiting())
        wanting = [seq for seq in waiting if not adapters.isdisjoint(seq.adapters)]
        return list(seqs) or wanting or self._scheduler.running() or waiting

    def recover(self) -> list[RequestOutput]:
        """Begins anew after a failed step; the outputs of the requests that are ended for it.

        Raises:
            PoolIntegrityError, ConfigError: it cannot be done: the device has no room for a new pool, or the books
                still disagree.
        """
        cause, outputs = self.failure, list[RequestOutput]()
        if cause is None:
            return outputs
        ended = self._quarantine.failed(self._suspects())
        self._plans, self._writes = [], ()
        self._scheduler.restart()
        self._adapters.transfers.restart()
        self._runner.restart()
        for seq in ended:
            log.error("request %r fails its steps and is ended", seq.request_id)
            outputs.append(self._results.fail(seq, StepFailedError.of(cause)))
        self._scheduler.check_integrity()
        self.failure = None
        return outputs
