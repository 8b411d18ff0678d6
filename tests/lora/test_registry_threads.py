"""Many threads at one registry: names and ids are given once, and nothing is loaded twice or left behind."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from multilora_jax.errors import AdapterError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.host_tier import HostTier
from multilora_jax.lora.reader import AdapterReader
from multilora_jax.lora.registry import AdapterRegistry
from multilora_jax.request import LoRARequest
from tests.lora.fake_builder import PAGE_BYTES, FakeBuilder


def parallel(count: int, call: Callable[[int], object]) -> list:
    """Results of `call(i)` from `count` threads that start together."""
    barrier = threading.Barrier(count)

    def run(i: int) -> object:
        barrier.wait()
        return call(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class SlowBuilder(FakeBuilder):
    """Every read waits a little, so that races show."""

    def build(self, weights, known=None):
        threading.Event().wait(0.005)
        return super().build(weights, known)


@pytest.fixture(autouse=True)
def only_new_garbage() -> Iterator[None]:
    """What earlier tests left is not searched again at each `gc.collect`."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def builder() -> FakeBuilder:
    return SlowBuilder()


@pytest.fixture
def reader(builder: FakeBuilder, host: HostTier) -> Iterator[AdapterReader]:
    reader = AdapterReader(builder, host)
    yield reader
    reader.close()


@pytest.fixture
def registry(reader: AdapterReader) -> AdapterRegistry:
    return AdapterRegistry(reader)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Four folders that can be registered."""
    for i in range(4):
        (tmp_path / str(i)).mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / str(i) / name).touch()
    return [str(tmp_path / str(i)) for i in range(4)]


def assert_right(registry: AdapterRegistry, host: HostTier) -> None:
    """What is held is what is registered and loaded, each name and id once."""
    gc.collect()
    adapters = registry.list()
    assert len({adapter.name for adapter in adapters}) == len(adapters) == len(registry._names_by_id)
    assert {adapter.int_id: adapter.name for adapter in adapters} == registry._names_by_id
    assert set(host.adapters()) == {adapter for adapter in adapters if adapter.version is not None}
    assert host.bytes == PAGE_BYTES * len(host)
    assert registry._name_locks == {}
    assert registry._reader._jobs == {}


def test_next_int_id_is_unique_and_skips_ids_in_use(registry, folders):
    registry.load(LoRARequest("a", 7, folders[0]))
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: registry.next_int_id(), range(200)))
    assert sorted(ids) == list(range(8, 208))


@pytest.mark.parametrize("paths", [1, 2])
def test_d22_twenty_parallel_loads_of_one_name(registry, builder, host, folders, outcome, paths):
    results = parallel(20, lambda i: outcome(registry.load, LoRARequest("a", 1, folders[i % paths])))
    assert results.count("adapter_exists") == 19
    assert [r for r in results if r != "adapter_exists"] == registry.list()
    assert builder.reads.total() == 1
    assert_right(registry, host)


def test_d22_parallel_requests_for_one_name_load_it_once(registry, builder, host, folders, outcome):
    results = parallel(20, lambda i: outcome(registry.resolve, LoRARequest("a", 1, folders[0])))
    assert set(results) == set(registry.list())
    assert len(registry.list()) == builder.reads.total() == 1
    assert_right(registry, host)


def test_d22_parallel_first_uses_of_one_name_load_it_once(registry, builder, host, folders):
    adapter = registry.register(LoRARequest("a", 1, folders[0]))
    parallel(20, lambda i: registry.ensure_loaded(adapter))
    assert builder.reads.total() == 1
    assert_right(registry, host)


def test_d22_different_names_load_in_parallel(registry, builder, host, folders):
    parallel(8, lambda i: registry.load(LoRARequest(f"a{i}", i + 1, folders[i % 4])))
    assert sorted(adapter.name for adapter in registry.list()) == [f"a{i}" for i in range(8)]
    assert builder.most > 1
    assert_right(registry, host)


def test_d22_one_id_under_two_names_goes_to_one_of_them(registry, host, folders, outcome):
    results = parallel(8, lambda i: outcome(registry.load, LoRARequest(f"a{i}", 1, folders[i % 4])))
    assert results.count("lora_int_id_in_use") == 7
    assert len(registry.list()) == 1
    del results
    assert_right(registry, host)


def test_d22_loads_and_removals_in_parallel(registry, host, folders, outcome):
    def work(i: int) -> str | Adapter:
        if i % 2:
            return outcome(registry.remove, "a")
        return outcome(registry.load, LoRARequest("a", 1, folders[0]))

    for _ in range(50):
        results = parallel(4, work)
        loaded = [r for r in results[::2] if isinstance(r, Adapter)]
        removed = [r for r in results[1::2] if isinstance(r, Adapter)]
        assert set(results) - set(loaded) - set(removed) <= {"adapter_exists", "unknown_adapter"}
        assert len(loaded) - len(removed) == len(registry.list()) <= 1
        assert_right(registry, host)
        outcome(registry.remove, "a")
    assert (len(host), host.bytes) == (0, 0)


def test_d22_a_hundred_threads_on_the_same_and_other_names(registry, reader, builder, host, folders, outcome):
    builder.errors[folders[3]] = AdapterError("damaged", reason="corrupt_weights")
    known = {
        "adapter_exists", "unknown_adapter", "lora_int_id_in_use", "corrupt_weights", "adapter_changed",
    }  # fmt: skip

    def work(seed: int) -> set[str]:
        rng, reasons = random.Random(seed), set()
        for _ in range(10):
            name, int_id, folder = rng.choice("abcdef"), rng.randint(1, 6), rng.choice(folders)
            request = LoRARequest(name, int_id, folder, load_inplace=rng.random() < 0.5)
            action = rng.choice((registry.load, registry.register, registry.resolve, registry.remove, use))
            argument = name if action in (registry.remove, use) else request
            result = outcome(action, argument)
            if isinstance(result, str):
                reasons.add(result)
        return reasons

    def use(name: str) -> Adapter:
        """As a request does: a first load, and a page-in once its pages are gone."""
        adapter = registry.get(name)
        registry.ensure_loaded(adapter)
        host.remove(adapter)
        reader.request(adapter)
        return adapter

    reasons = set().union(*parallel(100, work))
    assert reasons <= known
    assert {"adapter_exists", "unknown_adapter", "corrupt_weights"} <= reasons
    while reader._jobs:
        reader.wait(1)
    builder.errors.clear()  # one error for all, whose traceback knows who met it
    for adapter in registry.list():
        if adapter.version is not None and adapter not in host:  # its last page-in failed or was evicted by `use`
            reader.failure(adapter)
            registry.ensure_loaded(adapter)
            reader.load(adapter)
    assert_right(registry, host)
    for adapter in registry.list():
        registry.remove(adapter.name)
    del adapter
    assert_right(registry, host)
    assert (len(host), host.bytes, registry.list()) == (0, 0, [])


def test_d22_a_removal_while_the_first_use_loads(registry, reader, builder, host, folders):
    adapter = registry.register(LoRARequest("a", 1, folders[0]))
    gate = builder.close_gate(adapter)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(registry.ensure_loaded, adapter)
        while not builder.reads[adapter.folder]:
            pass
        registry.remove("a")
        gate.set()
        waiting.result(30)
    assert adapter.version is not None  # whoever waited may go on with it
    assert (len(host), registry.list()) == (0, [])


def test_d22_a_swap_is_seen_whole(registry, builder, host, folders):
    """Readers see the old adapter or the new one, loaded, at every moment of many swaps."""
    registry.load(LoRARequest("a", 1, folders[0]))
    stop, seen = threading.Event(), set()

    def look() -> None:
        while not stop.is_set():
            (adapter,) = registry.list()
            assert registry.get("a").version is not None
            assert adapter.version is not None
            seen.add(adapter.digest)

    with ThreadPoolExecutor(4) as pool:
        looking = [pool.submit(look) for _ in range(3)]
        for i in range(30):
            registry.load(LoRARequest("a", 1, folders[i % 3], load_inplace=True))
        stop.set()
        for future in looking:
            future.result(30)
    assert seen == set(folders[:3])
    assert_right(registry, host)


def test_d13_twenty_loads_and_removals_leave_nothing(registry, reader, host, folders):
    for i in range(20):
        adapter = registry.register(LoRARequest(f"a{i}", 1, folders[i % 4]))
        registry.ensure_loaded(adapter)
        assert (len(host), host.bytes) == (1, PAGE_BYTES)
        registry.remove(adapter.name)
        assert (len(host), host.bytes) == (0, 0)
    assert_right(registry, host)
