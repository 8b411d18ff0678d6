"""Adapters between disk, host and pool while requests run: loads that stall nobody, swaps, pins, failures, leaks."""

from __future__ import annotations

import gc
import shutil
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.errors import AdapterError, NotFoundError, UserError
from multilora_jax.lora import pacing
from multilora_jax.lora.reader import SlowStorage
from multilora_jax.request import LoRARequest
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_adapter, run_all, tiny_engine, tokens_of

PROMPT = "Hello there"


@pytest.fixture
def engine():
    return tiny_engine(max_cpu_loras=3)


def step_until(engine, condition, outputs=None, limit=2000):
    """Steps until the condition holds; collects the newest output of each request."""
    outputs = {} if outputs is None else outputs
    for _ in range(limit):
        if condition():
            return outputs
        outputs |= {output.request_id: output for output in engine.step()}
    raise AssertionError("it never came true")


def evict_from_host(engine, adapter):
    engine.adapters.host.remove(adapter)


def evict_from_pool(engine):
    with engine._books:
        order = engine.cache.order
        order.evict([adapter for adapter in engine.cache.residents() if order.is_idle(adapter)])


def test_registered_adapters_take_no_memory_until_they_are_used(engine, tmp_path):
    made = [make_adapter(tmp_path / f"a{i}", engine, 4, i) for i in range(3)]
    for request in made:
        engine.register_lora(request)
    assert set(engine.adapter_states().values()) == {"registered"}
    assert engine.stats().host_adapter_bytes == engine.stats().pages_adapter == 0
    assert [adapter.digest for adapter in engine.list_loras()] == [None] * 3
    run_all(engine, [Request(PROMPT, greedy(2), LoRARequest("a1", 1001))])
    assert engine.adapter_states() == {"a0": "registered", "a1": "resident", "a2": "registered"}
    assert engine.list_loras()[1].digest is not None


def test_d17_reading_gives_way_to_the_running_sequences(engine, tmp_path, monkeypatch):
    """The engine's own reader rests at every tensor and every part it packs, as long as sequences run."""
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    monkeypatch.setattr(pacing, "SHARE", 0.999)
    first, second = (make_adapter(tmp_path / f"a{i}", engine, 8, i) for i in range(2))
    rests, sleep = [], time.sleep
    monkeypatch.setattr(engine.adapters.reader._paced.__self__, "_sleep", lambda s: rests.append(s) or sleep(s))
    engine.add_lora(first)
    assert not rests
    engine.add_request("stream", PROMPT, greedy(20))
    engine.step()
    engine.add_lora(second)
    tensors = len(load_file(f"{second.lora_path}/adapter_model.safetensors"))
    assert len(rests) == 2 * tensors


def test_a_bad_registered_adapter_fails_its_own_requests_only(engine, tmp_path):
    good, bad = (make_adapter(tmp_path / name, engine, 4, i) for i, name in enumerate(("good", "bad")))
    (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    engine.register_lora(good)
    engine.register_lora(bad)
    with pytest.raises(AdapterError, match="LFS"):
        engine.add_request("bad", PROMPT, greedy(2), LoRARequest("bad", bad.lora_int_id))
    assert len(run_all(engine, [Request(PROMPT, greedy(2), good)])) == 1


def test_evict_and_reload_two_hundred_times_is_identical_and_leaks_nothing(tmp_path):
    engine = tiny_engine(pool_pages=40, max_cpu_loras=1, max_lora_rank=32, max_rank_rows=32)
    recorder = LogitsRecorder(engine)
    loras = [make_adapter(tmp_path / f"a{i}", engine, 32, i) for i in range(2)]
    first: list[np.ndarray] = []
    memory: list[int] = []
    for number in range(200):
        run_all(engine, [Request(PROMPT, greedy(1), loras[number % 2])])
        logits = recorder.take(0)
        if number < 2:
            first.append(logits)
        np.testing.assert_array_equal(logits, first[number % 2])
        (resident,) = engine.cache.residents()
        assert resident.name == loras[number % 2].lora_name
        pages = engine.adapters.host.get(resident)
        assert pages is not None
        in_pool = np.asarray(engine.runner.pool)[:, engine.cache.pages_of(resident)].swapaxes(0, 1)
        np.testing.assert_array_equal(in_pool, pages.reshape(in_pool.shape))
        assert len(engine.adapters.host) == 1
        if number in (50, 199):
            gc.collect()
            memory.append(rss_mib())
    stats = engine.stats()
    assert stats.adapter_evictions >= 199
    assert stats.host_evictions >= 199
    assert stats.pages_free + stats.pages_adapter == stats.pages_total
    # Each adapter has 1.5 MiB, so a copy kept at each round would be some 200.
    assert memory[1] - memory[0] < 60


def rss_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20


def test_d17_a_cold_load_from_slow_storage_stalls_nobody(tmp_path):
    storage = SlowStorage()
    engine = tiny_engine(throttle=storage)
    warm, cold = (make_adapter(tmp_path / name, engine, 8, i) for i, name in enumerate(("warm", "cold")))
    alone = tokens_of(run_all(engine, [Request(PROMPT, greedy(8), lora) for lora in (warm, cold)]))
    run_all(engine, [Request(PROMPT, greedy(2))])  # nothing is left to be compiled while the files are read
    for adapter in engine.list_loras():
        evict_from_host(engine, adapter)
    evict_from_pool(engine)
    storage._latency_s = 0.5
    engine.add_request("stream", PROMPT, greedy(200))
    step_until(engine, lambda: engine.stats().num_running == 1)
    steps_at_start = engine.stats().steps
    engine.add_request("cold", PROMPT, greedy(8), cold)
    engine.add_request("warm", PROMPT, greedy(8), warm)
    outputs: dict = {}
    step_until(engine, lambda: "cold" in outputs, outputs)
    # While the file was read the stream went on, a token every step.
    assert len(outputs["stream"].outputs[0].token_ids) > 10
    # The two loads ran side by side: neither waited for the other's.
    steps_of_one = engine.stats().steps - steps_at_start
    step_until(engine, lambda: "warm" in outputs, outputs)
    assert engine.stats().steps - steps_at_start - steps_of_one < steps_of_one / 2
    step_until(engine, lambda: all(outputs[name].finished for name in ("warm", "cold", "stream")), outputs)
    assert tokens_of([outputs["warm"], outputs["cold"]]) == alone


def test_pages_go_to_the_device_in_bounded_slices(tmp_path, monkeypatch):
    engine = tiny_engine(adapter_transfer_mib=0.1, max_lora_rank=64)
    engine_bytes = engine.geometry.page_bytes
    allowed = max(1, int(0.1 * 2**20 / engine_bytes))
    large = make_adapter(tmp_path / "large", engine, 64, 1)
    adapter = engine.add_lora(large)
    assert adapter.num_pages > 3 * allowed
    slices: list[int] = []
    write = engine.runner.write_pages

    def watched(writes):
        writes = list(writes)
        slices.append(len(writes))
        write(writes)

    monkeypatch.setattr(engine.runner, "write_pages", watched)
    (alone,) = tokens_of(run_all(engine, [Request(PROMPT, greedy(4), large)]))
    assert max(slices) == adapter.num_pages  # nothing ran: no reason to wait
    evict_from_pool(engine)
    slices.clear()
    engine.add_request("stream", PROMPT, greedy(60))
    step_until(engine, lambda: engine.stats().num_running == 1)
    engine.add_request("large", PROMPT, greedy(4), large)
    outputs = step_until(engine, lambda: engine.stats().num_running == 2)
    assert max(slices) == allowed
    assert sum(slices) == adapter.num_pages
    assert len(outputs["stream"].outputs[0].token_ids) >= adapter.num_pages // allowed - 1
    step_until(engine, lambda: not engine.has_unfinished_requests(), outputs)
    assert tokens_of([outputs["large"]]) == [alone]


@pytest.mark.parametrize("change", ["deleted", "overwritten"])
def test_an_adapter_whose_files_went_fails_only_its_own_requests(engine, tmp_path, change):
    lora, other = (make_adapter(tmp_path / name, engine, 4, i) for i, name in enumerate(("gone", "other")))
    (alone,) = tokens_of(run_all(engine, [Request(PROMPT, greedy(6), other)]))
    adapter = engine.add_lora(lora)
    evict_from_host(engine, adapter)
    shutil.rmtree(tmp_path / "gone")
    if change == "overwritten":
        make_adapter(tmp_path / "gone", engine, 4, 99)
    engine.add_request("lost", PROMPT, greedy(6), LoRARequest("gone", lora.lora_int_id))
    engine.add_request("fine", PROMPT, greedy(6), other)
    outputs = step_until(engine, lambda: not engine.has_unfinished_requests())
    lost = outputs["lost"]
    assert (lost.finished, lost.outputs[0].finish_reason, list(lost.outputs[0].token_ids)) == (True, "error", [])
    assert isinstance(lost.error, UserError)
    assert lost.error.reason == {"deleted": "adapter_path_not_found", "overwritten": "adapter_changed"}[change]
    assert tokens_of([outputs["fine"]]) == [alone]
    engine.check_integrity()
    if change == "overwritten":
        swapped = engine.add_lora(LoRARequest("gone", lora.lora_int_id, lora.lora_path, load_inplace=True))
        assert swapped.digest != adapter.digest
        (output,) = run_all(engine, [Request(PROMPT, greedy(6), LoRARequest("gone", lora.lora_int_id))])
        assert output.adapter_digest == swapped.digest


def test_a_swap_in_flight_keeps_every_request_on_its_version(engine, tmp_path):
    old = make_adapter(tmp_path / "v1", engine, 8, 1)
    new = make_adapter(tmp_path / "v2", engine, 16, 2)
    want_old, want_new = tokens_of(run_all(engine, [Request(PROMPT, greedy(12), lora) for lora in (old, new)]))
    for name in ("v1", "v2"):
        engine.remove_lora(name)
    assert engine.stats().pages_adapter == engine.stats().host_adapter_bytes == 0
    first = engine.add_lora(LoRARequest("x", 7, old.lora_path))
    by_name = LoRARequest("x", 7)
    engine.add_request("runs", PROMPT, greedy(12), by_name)
    engine.step()
    engine.add_request("waits", PROMPT, greedy(12), by_name)  # has the old version too, though it has not begun
    second = engine.add_lora(LoRARequest("x", 7, new.lora_path, load_inplace=True))
    shutil.rmtree(tmp_path / "v1")
    engine.add_request("late", PROMPT, greedy(12), by_name)
    outputs = step_until(engine, lambda: not engine.has_unfinished_requests())
    assert tokens_of(outputs[name] for name in ("runs", "waits", "late")) == [want_old, want_old, want_new]
    assert [outputs[name].adapter_digest for name in ("runs", "waits", "late")] == [first.digest] * 2 + [second.digest]
    assert engine.cache.residents() == [second]
    assert engine.adapters.host.adapters() == [second]


def test_a_pinned_adapter_is_brought_in_and_stays(engine, tmp_path):
    pinned, *others = (make_adapter(tmp_path / f"p{i}", engine, 16, i) for i in range(12))
    engine.add_lora(pinned, pinned=True)
    assert engine.has_unfinished_requests()
    step_until(engine, lambda: not engine.has_unfinished_requests())
    assert engine.adapter_states()["p0"] == "resident"
    evict_from_pool(engine)
    assert engine.adapter_states()["p0"] == "resident"
    run_all(engine, [Request(PROMPT, greedy(1), lora) for lora in others])
    assert engine.stats().resident[0] == ("p0", 16, True)
    engine.unpin_lora("p0")
    evict_from_pool(engine)
    assert engine.adapter_states()["p0"] in ("host", "registered")
    with pytest.raises(NotFoundError):
        engine.pin_lora("nobody")


def test_a_pin_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path):
    engine = tiny_engine(pool_pages=12, max_model_len=128)
    lora = make_adapter(tmp_path / "a", engine, 8, 1)
    engine.add_request("long", PROMPT, greedy(100))
    with pytest.raises(UserError) as refused:
        engine.add_lora(lora, pinned=True)
    assert refused.value.reason == "pin_limit"
    assert engine.list_loras() == []
    assert engine.abort_request("long")
    engine.check_integrity()


def test_d22_a_hundred_loads_and_unloads_under_traffic(engine, tmp_path):
    """From eight threads, of the same and of other names, while requests run; at the end everything is right."""
    keeper = make_adapter(tmp_path / "keeper", engine, 4, 50)
    (alone,) = tokens_of(run_all(engine, [Request(PROMPT, greedy(12), keeper)]))
    made = [make_adapter(tmp_path / f"a{i}", engine, 4, i) for i in range(4)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(13):
            which = int(rng.integers(4))
            try:
                if rng.random() < 0.5:
                    path = made[int(rng.integers(4))].lora_path
                    engine.add_lora(LoRARequest(f"n{which}", 100 + which, path, load_inplace=bool(rng.random() < 0.5)))
                else:
                    engine.remove_lora(f"n{which}")
            except UserError as error:
                if error.reason not in ("adapter_exists", "unknown_adapter"):
                    failures.append(error)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    finished: dict = {}
    number = 0
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        if any(thread.is_alive() for thread in threads) and engine.stats().num_running < 4:
            try:
                engine.add_request(f"k{number}", PROMPT, greedy(12), keeper)
                engine.add_request(f"n{number}", PROMPT, greedy(3), LoRARequest(f"n{number % 4}", 1))
            except NotFoundError:
                pass
            number += 1
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert not failures
    kept = [output for name, output in finished.items() if name.startswith("k")]
    assert kept
    assert tokens_of(kept) == [alone] * len(kept)
    assert not [output.error for output in finished.values() if output.error]
    registered = {adapter.name for adapter in engine.list_loras()}
    assert len(registered) == len(engine.list_loras())
    assert {name for name, *_ in engine.stats().tiers} <= registered
    for name in registered:
        engine.remove_lora(name)
    engine.check_integrity()
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.host_adapter_bytes == 0


def test_d23_unloading_one_adapter_touches_nobody_else(engine, tmp_path):
    a, b = (make_adapter(tmp_path / name, engine, 8, i) for i, name in enumerate("ab"))
    wanted = tokens_of(run_all(engine, [Request(PROMPT, greedy(10), lora) for lora in (a, b, None)]))
    for name, lora in (("a", a), ("b", b), ("base", None)):
        engine.add_request(name, PROMPT, greedy(10), lora)
    engine.step()
    engine.remove_lora("b")
    with pytest.raises(NotFoundError):
        engine.add_request("late", PROMPT, greedy(1), LoRARequest("b", b.lora_int_id))
    engine.add_request("more", PROMPT, greedy(10), a)
    outputs = step_until(engine, lambda: not engine.has_unfinished_requests())
    assert tokens_of(outputs[name] for name in ("a", "b", "base", "more")) == [*wanted, wanted[0]]


def test_adapters_are_named_by_their_ids_too(engine, tmp_path):
    loras = [make_adapter(tmp_path / name, engine, 4, i) for i, name in enumerate("ab")]
    assert [engine.add_lora(lora).name for lora in loras] == ["a", "b"]
    engine.pin_lora(loras[1].lora_int_id)
    step_until(engine, lambda: not engine.has_unfinished_requests())
    assert [name for name, _, _, pinned in engine.stats().tiers if pinned] == ["b"]
    engine.unpin_lora(loras[1].lora_int_id)
    engine.remove_lora(loras[1].lora_int_id)
    assert [adapter.name for adapter in engine.list_loras()] == ["a"]
    for call in (engine.pin_lora, engine.unpin_lora, engine.remove_lora):
        with pytest.raises(NotFoundError, match="77"):
            call(77)


def test_a_pinned_swap_without_room_leaves_the_old_version(tmp_path):
    engine = tiny_engine(pool_pages=14, max_model_len=128)
    old, new = make_adapter(tmp_path / "old", engine, 1, 1), make_adapter(tmp_path / "new", engine, 8, 2)
    adapter = engine.add_lora(LoRARequest("x", 7, old.lora_path))
    engine.add_request("long", PROMPT, greedy(100))
    with pytest.raises(UserError) as refused:
        engine.add_lora(LoRARequest("x", 7, new.lora_path, load_inplace=True), pinned=True)
    assert refused.value.reason == "pin_limit"
    assert engine.list_loras() == [adapter]
    assert engine.adapters.host.adapters() == [adapter]
    assert engine.abort_request("long")
    swapped = engine.add_lora(LoRARequest("x", 7, new.lora_path, load_inplace=True), pinned=True)
    assert engine.list_loras() == [swapped]
    step_until(engine, lambda: not engine.has_unfinished_requests())
    assert engine.stats().tiers == [("x", 8, "resident", True)]
