"""Many threads at one registry: names and ids are given once, and nothing is loaded twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import multilora_jax.lora.registry as registry_module
from multilora_jax.lora.packing import HostAdapter
from multilora_jax.request import LoRARequest


def test_next_int_id_is_unique_and_skips_ids_in_use(registry, peft_folder):
    registry.load(LoRARequest("a", 7, str(peft_folder())))
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: registry.next_int_id(), range(200)))
    assert sorted(ids) == list(range(8, 208))


def parallel(count: int, call) -> list:
    """Results of `call(i)` from `count` threads that start together."""
    barrier = threading.Barrier(count)

    def run(i: int):
        barrier.wait()
        return call(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.fixture
def slow_loads(monkeypatch):
    """Makes every load wait a little, so that races show; returns how many ran, and most at the same time."""
    counts = {"calls": 0, "now": 0, "most": 0}
    lock, real = threading.Lock(), registry_module.load_adapter

    def load(*args, **kwargs):
        with lock:
            counts["calls"] += 1
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
        try:
            threading.Event().wait(0.02)
            return real(*args, **kwargs)
        finally:
            with lock:
                counts["now"] -= 1

    monkeypatch.setattr(registry_module, "load_adapter", load)
    return counts


def test_d22_parallel_loads_of_one_name(registry, peft_folder, slow_loads, outcome):
    paths = [str(peft_folder("one")), str(peft_folder("two"))]
    results = parallel(20, lambda i: outcome(registry.load, LoRARequest("a", 1, paths[i % 2])))
    assert results.count("adapter_exists") == 19
    assert [r for r in results if r != "adapter_exists"] == registry.list()
    assert slow_loads["calls"] == 1
    assert registry._name_locks == {}


def test_d22_parallel_requests_for_one_name_load_it_once(registry, peft_folder, slow_loads, outcome):
    path = str(peft_folder())
    results = parallel(20, lambda i: outcome(registry.resolve, LoRARequest("a", 1, path)))
    assert set(results) == set(registry.list())
    assert len(registry.list()) == slow_loads["calls"] == 1


def test_d22_different_names_load_in_parallel(registry, peft_folder, slow_loads):
    path = str(peft_folder())
    parallel(8, lambda i: registry.load(LoRARequest(f"a{i}", i + 1, path)))
    assert sorted(adapter.name for adapter in registry.list()) == [f"a{i}" for i in range(8)]
    assert slow_loads["most"] > 1


def test_d22_one_id_under_two_names_goes_to_one_of_them(registry, peft_folder, slow_loads, outcome):
    path = str(peft_folder())
    results = parallel(8, lambda i: outcome(registry.load, LoRARequest(f"a{i}", 1, path)))
    assert results.count("lora_int_id_in_use") == 7
    assert len(registry.list()) == 1


def test_d22_loads_and_removals_in_parallel(registry, peft_folder, outcome):
    path = str(peft_folder())

    def work(i: int) -> str | HostAdapter:
        if i % 2:
            return outcome(registry.remove, "a")
        return outcome(registry.load, LoRARequest("a", 1, path))

    for _ in range(5):
        results = parallel(10, work)
        loaded = [r for r in results[::2] if isinstance(r, HostAdapter)]
        removed = [r for r in results[1::2] if isinstance(r, HostAdapter)]
        assert set(results) - set(loaded) - set(removed) <= {"adapter_exists", "unknown_adapter"}
        assert len(loaded) - len(removed) == len(registry.list()) <= 1
        outcome(registry.remove, "a")
    assert registry._name_locks == {}
