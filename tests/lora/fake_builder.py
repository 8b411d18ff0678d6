"""Adapters without files: what an AdapterReader needs of a builder, with gates that hold its reads up."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from multilora_jax.lora.adapter import Adapter, AdapterVersion

PAGE_BYTES = 1024


def make_adapter(name: str = "a", int_id: int = 1) -> Adapter:
    """A registered adapter whose folder is named after it."""
    return Adapter(name, int_id, f"/adapters/{name}", f"/adapters/{name}")


def until(condition: Callable[[], object]) -> None:
    """Waits for something that another thread is about to do."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class FakeBuilder:
    """Every folder holds an adapter of one page, whose digest is the folder.

    Attributes:
        gates: a read of such a folder waits for the event.
        errors: a read of such a folder raises this.
        reads: how often each folder was read.
        most: most reads at the same time.
        threads: native id to niceness of the threads that read.
    """

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, BaseException] = {}
        self.reads: Counter[str] = Counter()
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def read(self, folder: str, known: AdapterVersion | None = None) -> tuple[AdapterVersion, np.ndarray]:
        with self._lock:
            self.reads[folder] += 1
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            gate = self.gates.get(folder)
            assert gate is None or gate.wait(30)
            if folder in self.errors:
                raise self.errors[folder]
            return self.build(folder, known)
        finally:
            with self._lock:
                self._now -= 1

    def build(self, weights: Any, known: AdapterVersion | None = None) -> tuple[AdapterVersion, np.ndarray]:
        layout: Any = None
        return known or AdapterVersion(str(weights), layout), np.zeros(PAGE_BYTES, np.uint8)

    def close_gate(self, adapter: Adapter) -> threading.Event:
        """Holds up the reads of an adapter until the event is set."""
        return self.gates.setdefault(adapter.folder, threading.Event())
