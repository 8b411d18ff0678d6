"""Worker threads that bring adapters from their files into the host tier, while the engine goes on."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from multilora_jax.errors import NotFoundError, UnavailableError, UserError
from multilora_jax.lora.adapter import Adapter, AdapterVersion
from multilora_jax.lora.host_tier import HostTier
from multilora_jax.lora.pacing import Pacer
from multilora_jax.lora.weights import AdapterWeights

_NICENESS = 7
"""Added to the workers' own: with all cores taken they get about a sixth of one each, and all of an idle one."""
_CLOSE_WAIT_S = 10.0

log = logging.getLogger(__name__)

Check = Callable[[Adapter], None]
"""Raises where an adapter, complete but not yet served, must be refused."""


class Builder(Protocol):
    """What the reader needs of an AdapterBuilder."""

    def read(self, folder: str, known: AdapterVersion | None = None) -> tuple[AdapterVersion, np.ndarray]: ...
    def build(
        self, weights: AdapterWeights, known: AdapterVersion | None = None
    ) -> tuple[AdapterVersion, np.ndarray]: ...


class SlowStorage:
    """Emulates storage that is slower than this machine's: a `throttle` of AdapterReader. Safe from any thread.

    Args:
        bytes_per_second: what all readers together get; None for no limit.
        latency_s: seconds that every read takes on top.
    """

    def __init__(self, bytes_per_second: float | None = None, latency_s: float = 0.0) -> None:
        self._bytes_per_second = bytes_per_second
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __call__(self, num_bytes: int) -> float:
        """Seconds from now until a read of `num_bytes` that begins now is through."""
        if self._bytes_per_second is None:
            return self._latency_s
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_second
            return self._free_at - now + self._latency_s


@dataclass(eq=False)
class _Job:
    """One adapter that is being read or waits for a thread."""

    adapter: Adapter
    check: Check | None = None
    requested: bool = False
    forgotten: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class AdapterReader:
    """Reads, checks and packs adapters on threads of its own. Every method may be called from any thread.

    Adapters are read in parallel, as many as there are threads, and each once, however often it is asked for
    meanwhile. The threads run at a low priority of the operating system (on Linux), so that they take the cores that
    decoding leaves; they exist only while there is something to read.

    Args:
        builder: reads a folder.
        host: where the pages go.
        threads: most adapters read at the same time.
        pacer: holds the threads to a share of the cores; None for no limit.
        throttle: seconds to wait before files of so many bytes are read, see SlowStorage; None for none.
    """

    def __init__(
        self,
        builder: Builder,
        host: HostTier,
        *,
        threads: int = 8,
        pacer: Pacer | None = None,
        throttle: Callable[[int], float] | None = None,
    ) -> None:
        self.host = host
        self._builder = builder
        self._max_threads = threads
        self._paced = nullcontext if pacer is None else pacer.paced
        self._throttle = throttle
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._any_ended = False
        self._closed = threading.Event()
        self._jobs: dict[Adapter, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._threads: set[threading.Thread] = set()
        # Weak, because a failed adapter may be removed without anybody asking why it failed.
        self._failures: weakref.WeakKeyDictionary[Adapter, BaseException] = weakref.WeakKeyDictionary()

    def load(self, adapter: Adapter, check: Check | None = None) -> None:
        """Reads an adapter from its folder into the host tier; blocks until it is there.

        The first load of an adapter sets its version; every later one must find the same content.

        Args:
            adapter: with a folder.
            check: called with a copy of the adapter that has the version, before the adapter gets it; what it raises
                refuses the load.

        Raises:
            UnavailableError: the reader was closed (`shutting_down`).
            NotFoundError, AdapterError, ConfigError: see `AdapterBuilder.read`.
        """
        with self._lock:
            if self._closed.is_set():
                raise _shutting_down()
            job = self._submit(adapter, check)
        job.done.wait()
        try:
            if job.error is not None:
                raise job.error
        finally:
            del job  # the error's traceback refers to this frame

    def examine(self, adapter: Adapter, check: Check | None = None) -> None:
        """Reads and checks an adapter as `load` does, on the caller's thread, and keeps its pages nowhere."""
        self._read(adapter, check)

    def add(self, adapter: Adapter, weights: AdapterWeights, check: Check | None = None) -> None:
        """Takes an adapter from memory, on the caller's thread, into the host tier, where it is kept.

        Raises:
            AdapterError: see `AdapterBuilder.build`; or whatever `check` raises, see `load`.
        """
        version, pages = self._builder.build(weights)
        _accept(adapter, version, check)
        self.host.put(adapter, pages, keep=True)

    def request(self, adapter: Adapter) -> None:
        """Asks for an adapter that was loaded before to be in the host tier again; returns at once.

        Nothing happens while it is there, is on its way, or has failed and nobody took the failure.
        """
        assert adapter.version is not None, f"adapter {adapter.name!r} was never loaded"
        if adapter in self.host:
            return
        with self._lock:
            if not self._closed.is_set() and adapter not in self._failures:
                self._submit(adapter).requested = True

    def failure(self, adapter: Adapter) -> BaseException | None:
        """Why the last request for an adapter failed, told once; None if it did not, or has not yet."""
        with self._lock:
            return self._failures.pop(adapter, None)

    def forget(self, adapter: Adapter) -> None:
        """Frees the host copy of an adapter that is no longer served, and one that is on its way when it comes.

        A load that waits for it ends as if nothing had happened; whoever asks for the adapter again gets it again.
        """
        with self._lock:
            job = self._jobs.get(adapter)
            if job is not None:
                job.forgotten = True
            self.host.remove(adapter)

    def is_reading(self, adapter: Adapter) -> bool:
        """Whether an adapter is being read or waits for a thread."""
        with self._lock:
            return adapter in self._jobs

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a load ends, whether it succeeds or not; for one waiting thread.

        Returns:
            Whether one ended since this was called last: at once if so. False after `timeout_s` or on `close`.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._any_ended or self._closed.is_set(), timeout_s)
            ended, self._any_ended = self._any_ended, False
            return ended

    def close(self) -> None:
        """Ends the threads: what is being read is finished, what waits fails (`shutting_down`), and so do new loads."""
        self._closed.set()
        with self._lock:
            waiting = [*self._queue]
            self._queue.clear()
            for job in waiting:
                self._end(job, _shutting_down())
            self._ended.notify_all()
            threads = [*self._threads]
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _submit(self, adapter: Adapter, check: Check | None = None) -> _Job:
        """The job that reads `adapter`, an existing one if there is one. Called with the lock held."""
        job = self._jobs.get(adapter)
        if job is None:
            if len(self._threads) < self._max_threads:
                thread = threading.Thread(target=self._work, name="adapter-reader", daemon=True)
                thread.start()  # waits for the lock; where no thread can be had, nothing has changed
                self._threads.add(thread)
            job = self._jobs[adapter] = _Job(adapter, check)
            self._queue.append(job)
        job.forgotten = False
        return job

    def _work(self) -> None:
        _lower_priority()
        while True:
            with self._lock:
                if not self._queue:
                    self._threads.discard(threading.current_thread())
                    return
                job = self._queue.popleft()
            try:
                # No frame of it may hold the job, which will hold the error.
                pages = self._read(job.adapter, job.check)
            except BaseException as error:
                if not isinstance(error, UserError):
                    log.exception("adapter %r could not be read", job.adapter.name)
                with self._lock:
                    self._end(job, error)
            else:
                with self._lock:
                    if not job.forgotten:
                        self.host.put(job.adapter, pages)
                    self._end(job, None)
                del pages  # they may be evicted while the next adapter is read

    def _read(self, adapter: Adapter, check: Check | None) -> np.ndarray:
        if not adapter.folder:
            raise NotFoundError(
                f"adapter {adapter.name!r} was added from memory and removed: add it again",
                reason="unknown_adapter", param="model",
            )  # fmt: skip
        if self._throttle is not None:
            self._closed.wait(self._throttle(_folder_bytes(adapter.folder)))
            if self._closed.is_set():
                raise _shutting_down()
        with self._paced():
            version, pages = self._builder.read(adapter.folder, adapter.version)
        if adapter.version is None:
            _accept(adapter, version, check)
        return pages

    def _end(self, job: _Job, error: BaseException | None) -> None:
        """Called with the lock held."""
        del self._jobs[job.adapter]
        if error is not None and job.requested:
            # Without what hangs on its traceback: frames with whole adapters in them, this one's job among them.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._failures[job.adapter] = error
        job.error = error
        job.done.set()
        self._any_ended = True
        self._ended.notify_all()


def _accept(adapter: Adapter, version: AdapterVersion, check: Check | None) -> None:
    if check is not None:
        check(replace(adapter, version=version))
    adapter.version = version
    for warning in version.warnings:
        log.warning("adapter %r: %s", adapter.name, warning)


def _folder_bytes(folder: str) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except OSError:  # the read itself says what is wrong
        return 0


def _shutting_down() -> UnavailableError:
    return UnavailableError("the engine is shutting down", reason="shutting_down")


def _lower_priority() -> None:
    """Of the calling thread alone; elsewhere than on Linux a process id is all that setpriority takes."""
    with suppress(AttributeError, OSError):
        if os.uname().sysname == "Linux":
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(19, niceness))
