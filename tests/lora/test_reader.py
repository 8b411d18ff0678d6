"""Reads of many adapters at once: each once, none behind another, and nothing left over."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from multilora_jax.errors import AdapterError, NotFoundError, UnavailableError, UserError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.host_tier import HostTier
from multilora_jax.lora.reader import AdapterReader, SlowStorage
from tests.lora.fake_builder import PAGE_BYTES, FakeBuilder, make_adapter, until


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "adapter-reader"]


def waiters_of(reader: AdapterReader, adapter: Adapter) -> int:
    """Threads that wait for a load, deep in the standard library's event."""
    done: Any = reader._jobs[adapter].done
    return len(done._cond._waiters)


@pytest.fixture
def builder() -> FakeBuilder:
    return FakeBuilder()


@pytest.fixture
def make_reader(builder: FakeBuilder, host: HostTier) -> Iterator[Callable[..., AdapterReader]]:
    readers = []

    def make(**options) -> AdapterReader:
        readers.append(AdapterReader(builder, host, **options))
        return readers[-1]

    yield make
    for gate in builder.gates.values():
        gate.set()
    for reader in readers:
        reader.close()
    until(lambda: not worker_threads())


@pytest.fixture
def reader(make_reader) -> AdapterReader:
    return make_reader()


def loaded(reader: AdapterReader, *names: str) -> list[Adapter]:
    """Adapters whose version is known and whose pages were evicted."""
    adapters = [make_adapter(name) for name in names]
    for adapter in adapters:
        reader.load(adapter)
        reader.host.remove(adapter)
    reader.wait(0)
    return adapters


def test_a_load_sets_the_version_and_leaves_the_pages(reader, host):
    adapter = make_adapter()
    reader.load(adapter)
    version = adapter.version
    assert adapter.digest == adapter.folder
    assert host.get(adapter).nbytes == PAGE_BYTES
    reader.load(adapter)
    assert adapter.version is version


def test_a_check_comes_before_the_version(reader, host, outcome):
    adapter, seen = make_adapter(), []

    def check(candidate: Adapter) -> None:
        seen.append((candidate.name, candidate.digest, adapter.version))
        raise UserError("no room", reason="no_room")

    for _ in range(2):
        assert outcome(reader.load, adapter, check) == "no_room"
    assert outcome(reader.add, adapter, "weights", check) == "no_room"
    assert seen == [("a", adapter.folder, None)] * 2 + [("a", "weights", None)]
    assert adapter.version is None
    assert adapter not in host


def test_one_from_memory_is_kept_and_cannot_be_read_again(reader):
    host = HostTier(max_adapters=1)
    reader.host = host
    adapter = Adapter("memory", 1, "")
    reader.add(adapter, "weights")
    assert adapter.digest == "weights"
    reader.load(other := make_adapter("other"))
    assert adapter in host
    assert other in host
    host.remove(adapter)
    reader.request(adapter)
    until(lambda: not reader.is_reading(adapter))
    assert isinstance(reader.failure(adapter), NotFoundError)


def test_requests_come_at_once_and_are_answered_in_parallel(reader, builder, host):
    adapters = loaded(reader, *"abcd")
    builder.most = 0
    gates = [builder.close_gate(adapter) for adapter in adapters]
    for adapter in adapters:
        reader.request(adapter)
    until(lambda: builder.most == 4)
    assert not reader.wait(0)
    assert all(reader.is_reading(adapter) for adapter in adapters)
    for gate in gates:
        gate.set()
    until(lambda: len(host) == 4)
    assert not any(reader.failure(adapter) for adapter in adapters)


def test_an_adapter_is_read_once_however_often_it_is_wanted(reader, builder, host):
    (adapter,) = loaded(reader, "a")
    builder.reads.clear()
    gate = builder.close_gate(adapter)
    for _ in range(10):
        reader.request(adapter)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(reader.load, adapter) for _ in range(8)]
        until(lambda: waiters_of(reader, adapter) == 8)
        gate.set()
        for future in waiting:
            future.result(30)
    until(lambda: not reader.is_reading(adapter))
    reader.request(adapter)  # it is there
    assert not reader.is_reading(adapter)
    assert builder.reads[adapter.folder] == 1


def test_d17_nobody_waits_behind_another_s_slow_load(reader, builder, host):
    slow, quick = loaded(reader, "slow", "quick")
    gate = builder.close_gate(slow)
    reader.request(slow)
    until(lambda: builder.reads[slow.folder] == 2)
    for _ in range(3):
        host.remove(quick)
        reader.request(quick)
        assert reader.wait(30)
        assert quick in host
    reader.load(make_adapter("new"))
    assert slow not in host
    gate.set()
    until(lambda: slow in host)


def test_no_more_threads_than_allowed_and_none_without_work(make_reader, builder):
    reader = make_reader(threads=3)
    assert worker_threads() == []
    adapters = loaded(reader, *"abcdefghij")
    until(lambda: not worker_threads())
    gates = [builder.close_gate(adapter) for adapter in adapters]
    builder.most = 0
    for adapter in adapters:
        reader.request(adapter)
    until(lambda: builder.most == 3)
    assert len(worker_threads()) == 3
    assert all(thread.daemon for thread in worker_threads())
    for gate in gates:
        gate.set()
    until(lambda: len(reader.host) == 10)
    assert builder.most == 3
    until(lambda: not worker_threads())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own elsewhere")
def test_workers_leave_the_cores_to_decoding(reader, builder):
    before, found = os.getpriority(os.PRIO_PROCESS, 0), []
    read = builder.read

    def noted(folder, known=None):
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return read(folder, known)

    builder.read = noted
    reader.load(make_adapter())
    assert found == [min(19, before + 7)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_what_is_forgotten_on_its_way_does_not_stay(reader, builder, host):
    adapter = make_adapter()
    for again in (False, True):
        gate = builder.gates[adapter.folder] = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.load, adapter)
            until(lambda: reader.is_reading(adapter))
            reader.forget(adapter)
            if again:
                reader.request(adapter)
            gate.set()
            waiting.result(30)
        assert adapter.version is not None
        assert (adapter in host) == again
    reader.forget(adapter)
    assert (len(host), host.bytes) == (0, 0)


def test_failures_are_kept_until_taken(reader, builder, host):
    bad, good = loaded(reader, "bad", "good")
    builder.errors[bad.folder] = AdapterError("damaged", reason="corrupt_weights")
    reader.request(bad)
    reader.request(good)
    until(lambda: good in host and not reader.is_reading(bad))
    reader.request(bad)  # not again before the failure was heard of
    assert not reader.is_reading(bad)
    assert reader.failure(good) is None
    failure = reader.failure(bad)
    assert failure is builder.errors.pop(bad.folder)
    assert failure.__traceback__ is None
    assert reader.failure(bad) is None
    reader.request(bad)
    until(lambda: bad in host)


def test_a_blocking_load_raises_and_leaves_no_failure(reader, builder, outcome):
    adapter = make_adapter()
    builder.errors[adapter.folder] = AdapterError("damaged", reason="corrupt_weights")
    assert outcome(reader.load, adapter) == "corrupt_weights"
    assert reader.failure(adapter) is None
    assert adapter.version is None
    del builder.errors[adapter.folder]
    reader.load(adapter)
    assert adapter.version is not None


def test_a_fault_of_the_program_is_logged_and_told(reader, builder, caplog):
    adapter = make_adapter()
    builder.errors[adapter.folder] = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        reader.load(adapter)
    assert "adapter 'a' could not be read" in caplog.text
    reader.load(make_adapter("next"))  # the threads go on


def test_wait_hears_of_what_ended_before_and_meanwhile(reader, builder):
    (adapter,) = loaded(reader, "a")
    assert not reader.wait(0.01)
    reader.request(adapter)
    until(lambda: not reader.is_reading(adapter))
    assert reader.wait(0)
    assert not reader.wait(0)
    reader.host.remove(adapter)
    builder.errors[adapter.folder] = AdapterError("damaged")
    gate = builder.close_gate(adapter)
    reader.request(adapter)
    threading.Timer(0.05, gate.set).start()
    start = time.monotonic()
    assert reader.wait(30)  # a failure ends a load too
    assert time.monotonic() - start < 20


def test_close_ends_everything(make_reader, builder, outcome):
    reader = make_reader(threads=1)
    running, queued, later = loaded(reader, "running", "queued", "later")
    gate = builder.close_gate(running)
    reader.request(running)
    until(lambda: builder.reads[running.folder] == 2)
    reader.request(queued)
    with ThreadPoolExecutor(3) as pool:
        blocked = pool.submit(outcome, reader.load, queued)
        closing = pool.submit(reader.close)
        assert blocked.result(30) == "shutting_down"
        assert isinstance(reader.failure(queued), UnavailableError)
        assert reader.wait(30)
        assert not reader.wait(30)  # at once
        gate.set()
        closing.result(30)
    assert running in reader.host
    assert worker_threads() == []
    assert outcome(reader.load, later) == "shutting_down"
    reader.request(later)
    assert not reader.is_reading(later)
    reader.close()


def test_close_cuts_emulated_delays_short(make_reader, outcome):
    reader = make_reader(throttle=SlowStorage(latency_s=600))
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(outcome, reader.load, make_adapter())
        until(worker_threads)
        reader.close()
        assert blocked.result(30) == "shutting_down"


def test_slow_storage(make_reader, tmp_path):
    latency, disk = SlowStorage(latency_s=0.5), SlowStorage(bytes_per_second=1000, latency_s=0.25)
    assert latency(10**9) == 0.5
    assert disk(1000) == pytest.approx(1.25, abs=0.1)
    assert disk(500) == pytest.approx(1.75, abs=0.1)  # behind the first
    (tmp_path / "weights").write_bytes(bytes(3000))
    sizes = []
    reader = make_reader(throttle=lambda num_bytes: sizes.append(num_bytes) or 0.03)
    start = time.monotonic()
    reader.load(Adapter("a", 1, str(tmp_path), str(tmp_path)))
    assert time.monotonic() - start >= 0.03
    reader.load(make_adapter("nowhere"))
    assert sizes == [3000, 0]


def test_nothing_is_kept_of_what_nobody_refers_to(reader, builder, host, outcome):
    damaged = AdapterError("damaged", reason="damaged")

    def failed_request() -> weakref.ref[Adapter]:
        (adapter,) = loaded(reader, "failed")
        builder.errors[adapter.folder] = damaged
        reader.request(adapter)
        until(lambda: not reader.is_reading(adapter))
        return weakref.ref(adapter)

    def failed_load() -> weakref.ref[Adapter]:
        adapter = make_adapter("refused")
        builder.errors[adapter.folder] = damaged
        assert outcome(reader.load, adapter) == "damaged"
        return weakref.ref(adapter)

    def removed_in_flight() -> weakref.ref[Adapter]:
        (adapter,) = loaded(reader, "removed")
        gate = builder.close_gate(adapter)
        reader.request(adapter)
        until(lambda: builder.reads[adapter.folder] == 2)
        host.remove(adapter)
        gate.set()
        return weakref.ref(adapter)

    gc.disable()
    try:
        gone = [failed_request(), failed_load(), removed_in_flight()]
        builder.errors.clear()
        damaged.__traceback__ = None
        until(lambda: not worker_threads())
        assert [ref() for ref in gone] == [None] * 3
        assert (len(host), host.bytes) == (0, 0)
    finally:
        gc.enable()
