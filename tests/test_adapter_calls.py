"""What the asyncio engine does with adapters: first loads that hold up nobody, pins, unloads that drain."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from multilora_jax.errors import AdapterError, NotFoundError, UnavailableError, UserError
from multilora_jax.request import LoRARequest, SamplingParams
from tests.server.fake_engine import GOLDEN
from tests.server.harness import wait_for

pytestmark = pytest.mark.anyio

ADAPTER, OTHER = (str(GOLDEN / "cases" / case) for case in ("all_linear", "attn_only"))
LONG = 5000


async def last(generator):
    return [output async for output in generator][-1]


def ask(engine, request_id, lora_request, max_tokens=2, prompt: Any = "hi"):
    params = SamplingParams(max_tokens=max_tokens)
    return asyncio.create_task(last(engine.generate(prompt, params, request_id, lora_request=lora_request)))


async def test_adapters_are_loaded_listed_and_removed_by_name_or_id(make_engine):
    engine, _ = make_engine()
    adapter = await engine.add_lora(LoRARequest("a", 7, ADAPTER))
    assert engine.list_loras() == [adapter]
    output = await last(engine.generate("hi", SamplingParams(max_tokens=2), "r1", lora_request=LoRARequest("a", 7)))
    assert (output.outputs[0].text, output.adapter_digest) == ("a:", adapter.digest)
    assert await engine.remove_lora(7) == 0
    assert engine.list_loras() == []
    with pytest.raises(NotFoundError):
        await engine.remove_lora(7)
    with pytest.raises(NotFoundError):
        await engine.remove_lora("a")
    with pytest.raises(NotFoundError):
        await engine.submit("hi", SamplingParams(), "r2", lora_request=LoRARequest("a", 7))


async def test_generate_loads_a_new_adapter_off_the_engine_thread(make_engine):
    engine, fake = make_engine()
    fake.gate.clear()  # the engine thread is busy, yet the load goes through
    blocker = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=3), "r0")))
    request = LoRARequest("a", 1, ADAPTER)
    calls = [
        asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=2), f"a{i}", lora_request=request)))
        for i in range(4)
    ]
    await wait_for(lambda: len(engine.list_loras()) == 1)
    fake.gate.set()
    assert [(await call).outputs[0].text for call in calls] == ["a:"] * 4
    await blocker
    with pytest.raises(NotFoundError, match="'new'"):
        await last(engine.generate("hi", SamplingParams(), "r9", lora_request=LoRARequest("new", 2)))


async def test_d23_remove_waits_for_running_requests_of_that_adapter_only(make_engine):
    engine, fake = make_engine(step_seconds=0.002)
    for int_id, name in ((1, "a"), (2, "b")):
        await engine.add_lora(LoRARequest(name, int_id, ADAPTER))
    streams = {
        name: await engine.submit("hi", SamplingParams(max_tokens=n), name, lora_request=LoRARequest(name, int_id))
        for int_id, name, n in ((1, "a", 100), (2, "b", LONG))
    }
    assert await engine.remove_lora("a", wait_s=0.0) == 1
    with pytest.raises(NotFoundError):
        await engine.submit("hi", SamplingParams(), "r3", lora_request=LoRARequest("a", 1))
    assert len((await streams["a"].final()).outputs[0].token_ids) == 100
    assert "b" in fake.requests
    removal = asyncio.create_task(engine.remove_lora("b", wait_s=10.0))
    await asyncio.sleep(0.05)
    assert not removal.done()
    await streams["b"].aclose()
    assert await asyncio.wait_for(removal, 2) == 0


# ---- first loads


async def test_a_cold_load_holds_up_its_own_requests_only(make_engine):
    engine, fake = make_engine(lora_modules={"cold": ADAPTER, "other": OTHER})
    gate = fake.builder.gates[ADAPTER] = threading.Event()
    cold = [ask(engine, f"cold-{i}", LoRARequest("cold", 1)) for i in range(80)]  # more than there are threads
    await wait_for(lambda: fake.builder.reads == [ADAPTER])
    for name, lora_request in (("base", None), ("other", LoRARequest("other", 2))):
        output = await asyncio.wait_for(ask(engine, name, lora_request, 10), 5)
        assert output.outputs[0].text.startswith(f"{name}:")
    assert not any(call.done() for call in cold)
    gate.set()
    assert {(await call).outputs[0].text for call in cold} == {"co"}
    assert fake.builder.reads == [ADAPTER, OTHER]
    fake.builder.gates.clear()
    assert (await ask(engine, "warm", LoRARequest("cold", 1))).finished
    assert len(fake.builder.reads) == 2


async def test_the_adapters_of_a_mix_are_loaded_side_by_side(make_engine):
    engine, fake = make_engine(lora_modules={"a": ADAPTER, "b": OTHER})
    gates = fake.builder.gates = {path: threading.Event() for path in (ADAPTER, OTHER)}
    mix = [LoRARequest("a", 1, scale=0.5), LoRARequest("b", 2, scale=-2)]
    call = ask(engine, "mix", mix, 12)
    await wait_for(lambda: len(fake.builder.reads) == 2)
    for gate in gates.values():
        gate.set()
    output = await call
    assert output.outputs[0].text == "a*0.5+b*-2:a"
    assert output.adapter_digests == tuple(adapter.digest for adapter in engine.list_loras())


async def test_scales_of_one_adapter_share_its_load(make_engine):
    engine, fake = make_engine(lora_modules={"a": ADAPTER})
    gate = fake.builder.gates[ADAPTER] = threading.Event()
    calls = [ask(engine, f"r{i}", LoRARequest("a", 1, scale=1.0 + i), 8) for i in range(3)]
    await wait_for(lambda: len(fake.builder.reads) == 1)
    assert len(engine._first_loads) == 1
    gate.set()
    assert [(await call).outputs[0].text for call in calls] == ["a:abcdef", "a*2:abcd", "a*3:abcd"]
    assert engine._first_loads == {}


async def test_a_bad_adapter_fails_each_of_its_requests_and_may_be_mended(make_engine, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    engine, _ = make_engine(lora_modules={"bad": str(tmp_path), "good": ADAPTER})
    mix = [LoRARequest("good", 2), LoRARequest("bad", 1)]
    requests = [LoRARequest("bad", 1), LoRARequest("bad", 1), mix]
    results = await asyncio.gather(*(ask(engine, f"r{i}", r) for i, r in enumerate(requests)), return_exceptions=True)
    assert [type(result) for result in results] == [AdapterError] * 3
    assert len({id(result) for result in results}) == 3
    assert engine.num_live_requests == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((GOLDEN / "cases" / "all_linear" / name).read_bytes())
    assert (await ask(engine, "again", mix, 10)).outputs[0].text == "good*1+bad"


@pytest.mark.parametrize("queued", [False, True])
async def test_a_caller_that_leaves_during_the_load_leaves_it_to_the_others(make_engine, monkeypatch, queued):
    monkeypatch.setattr("multilora_jax.adapter_calls.MAX_CALLS", 1)
    engine, fake = make_engine(lora_modules={"a": ADAPTER, "first": OTHER})
    gates = fake.builder.gates = {ADAPTER: threading.Event(), OTHER: threading.Event()}
    if not queued:
        gates[OTHER].set()
    first = ask(engine, "first", LoRARequest("first", 2))
    await wait_for(lambda: fake.builder.reads == [OTHER])
    leaver, stayer = (ask(engine, name, LoRARequest("a", 1)) for name in ("leaver", "stayer"))
    await wait_for(lambda: len(engine._first_loads) == 1 + queued)
    await wait_for(lambda: queued or len(fake.builder.reads) == 2)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    await wait_for(lambda: engine.num_live_requests == 1 + queued)
    for gate in gates.values():
        gate.set()
    assert (await stayer).outputs[0].text == "a:"
    assert (await first).finished
    assert fake.builder.reads == [OTHER, ADAPTER]
    assert not fake.requests


async def test_a_request_can_be_aborted_while_its_adapter_is_being_loaded(make_engine):
    engine, fake = make_engine(lora_modules={"a": ADAPTER})
    gate = fake.builder.gates[ADAPTER] = threading.Event()
    call = ask(engine, "r1", LoRARequest("a", 1))
    await wait_for(lambda: len(fake.builder.reads) == 1)
    assert await engine.abort("r1")
    await wait_for(lambda: engine.num_live_requests == 0)
    gate.set()
    output = await asyncio.wait_for(call, 5)
    assert output.outputs[0].finish_reason == "abort"
    assert not fake.params_seen


async def test_an_engine_that_stops_during_a_load_fails_its_request(make_engine):
    engine, fake = make_engine(lora_modules={"a": ADAPTER})
    gate = fake.builder.gates[ADAPTER] = threading.Event()
    call = ask(engine, "r1", LoRARequest("a", 1))
    await wait_for(lambda: len(fake.builder.reads) == 1)
    await asyncio.to_thread(engine.shutdown, False)
    gate.set()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(call, 5)
    with pytest.raises(UnavailableError):
        await engine.prepare(LoRARequest("a", 1))


async def test_times_count_from_the_caller_s_arrival(make_engine):
    engine, fake = make_engine(lora_modules={"a": ADAPTER})
    gate = fake.builder.gates[ADAPTER] = threading.Event()
    started = time.monotonic()
    call = ask(engine, "r1", LoRARequest("a", 1))
    await asyncio.sleep(0.1)
    gate.set()
    times = (await call).metrics
    assert times.arrival_time - started < 0.08
    assert times.first_token_time - times.arrival_time > 0.09
    stream = await engine.submit("hi", SamplingParams(max_tokens=1), "r2", arrival_time=started)
    assert (await stream.final()).metrics.arrival_time == started


async def test_generate_with_load_inplace_swaps_first(make_engine):
    engine, _ = make_engine(lora_modules={"a": ADAPTER})
    old = await ask(engine, "r1", LoRARequest("a", 1))
    new = await ask(engine, "r2", LoRARequest("a", 1, OTHER, load_inplace=True))
    assert old.adapter_digest != new.adapter_digest
    assert [adapter.digest for adapter in engine.list_loras()] == [new.adapter_digest]


@pytest.mark.parametrize("lora_request", ["a", [None], ["a"], [LoRARequest("a", 1), None], {"name": "a"}])
async def test_what_is_no_adapter_is_refused(make_engine, lora_request):
    engine, _ = make_engine(lora_modules={"a": ADAPTER})
    with pytest.raises(UserError) as caught:
        await ask(engine, "r1", lora_request)
    assert caught.value.reason == "bad_lora_request"
    assert engine.num_live_requests == 0


# ---- failures while waiting in the engine


async def test_a_request_that_the_engine_gives_up_raises_an_error_of_its_own(make_engine):
    engine, fake = make_engine(lora_modules={"a": ADAPTER})
    error = AdapterError("the files have changed", reason="adapter_changed", param="model")
    seen = []
    engine.add_observer(seen.append)
    fake.gate.clear()
    calls = [ask(engine, f"r{i}", LoRARequest("a", 1)) for i in range(2)]
    await wait_for(lambda: len(fake.requests) >= 1)
    fake.give_up["a"] = error
    fake.gate.set()
    results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert [(type(r), r.reason, r.param, str(r)) for r in results] == [
        (AdapterError, "adapter_changed", "model", "the files have changed")
    ] * 2
    assert len({id(error), *map(id, results)}) == 3
    assert [output.outputs[0].finish_reason for output in seen] == ["error"] * 2
    assert engine.num_live_requests == 0


# ---- management


async def test_adapters_are_pinned_and_unpinned_by_name_or_id(make_engine):
    engine, fake = make_engine(lora_modules={"a": ADAPTER, "b": OTHER})
    fake.max_pinned = 1
    await engine.pin_lora("a")
    with pytest.raises(UserError) as caught:
        await engine.pin_lora(2)
    assert caught.value.reason == "pin_limit"
    await engine.unpin_lora(1)
    await engine.pin_lora(2)
    assert (await engine.stats()).tiers == [("a", 8, "resident", False), ("b", 4, "resident", True)]
    with pytest.raises(UserError, match="no room"):
        await engine.add_lora(LoRARequest("c", 3, ADAPTER), pinned=True)
    assert [adapter.name for adapter in engine.list_loras()] == ["a", "b"]
    for call in (engine.pin_lora, engine.unpin_lora):
        for nobody in ("nobody", 9):
            with pytest.raises(NotFoundError):
                await call(nobody)


async def test_a_pin_returns_when_the_adapter_is_in_the_pool(make_engine):
    engine, fake = make_engine(lora_modules={"a": ADAPTER})
    fake.loading = {"a", "b"}
    calls = {
        "a": asyncio.create_task(engine.pin_lora("a")),
        "b": asyncio.create_task(engine.add_lora(LoRARequest("b", 2, OTHER), pinned=True)),
    }
    await wait_for(lambda: len(fake.pinned) == 2)
    for name, call in calls.items():
        await asyncio.sleep(0.05)
        assert not call.done()
        fake.loading.remove(name)
        await asyncio.wait_for(call, 5)
    assert calls["b"].result() in engine.list_loras()
    fake.loading = {"c"}
    await asyncio.wait_for(engine.add_lora(LoRARequest("c", 3, OTHER)), 5)


async def test_a_pin_does_not_wait_for_ever_nor_for_what_is_gone(make_engine, monkeypatch):
    engine, fake = make_engine(lora_modules={"a": ADAPTER, "b": OTHER})
    fake.loading = {"a", "b"}
    gone = asyncio.create_task(engine.pin_lora("a"))
    await wait_for(lambda: len(fake.pinned) == 1)
    await engine.remove_lora("a")
    await asyncio.wait_for(gone, 5)
    monkeypatch.setattr("multilora_jax.adapter_calls.PIN_WAIT_S", 0.05)
    await asyncio.wait_for(engine.pin_lora("b"), 5)
    assert fake.adapter_states() == {"b": "loading"}


async def test_a_registered_adapter_is_not_read_and_one_in_memory_needs_no_file(make_engine):
    engine, fake = make_engine()
    adapter = await engine.register_lora(LoRARequest("a", 1, ADAPTER))
    assert (adapter.version, fake.builder.reads) == (None, [])
    added = await engine.add_adapter("b", {"folder": ADAPTER}, {"peft_type": "LORA"})
    assert fake.builder.reads == []
    with pytest.raises(UserError) as caught:
        await engine.add_adapter("b", {"folder": OTHER})
    assert caught.value.reason == "adapter_exists"
    swapped = await engine.add_adapter("b", {"folder": OTHER}, load_inplace=True)
    assert (await ask(engine, "r1", LoRARequest("b", added.int_id))).adapter_digest == swapped.digest != added.digest


async def test_d23_a_removal_waits_for_the_mixes_that_contain_the_adapter(make_engine):
    engine, fake = make_engine(step_seconds=0.002, lora_modules={"a": ADAPTER, "b": OTHER})
    mix = [LoRARequest("a", 1, scale=2), LoRARequest("b", 2)]
    stream = await engine.submit("hi", SamplingParams(max_tokens=LONG), "mix", lora_request=mix)
    alone = await engine.submit("hi", SamplingParams(max_tokens=LONG), "a", lora_request=LoRARequest("a", 1))
    assert await engine.remove_lora("b") == 1
    removal = asyncio.create_task(engine.remove_lora("a", wait_s=10.0))
    await asyncio.sleep(0.05)
    assert not removal.done()
    await stream.aclose()
    await asyncio.sleep(0.05)
    assert not removal.done()
    await alone.aclose()
    assert await asyncio.wait_for(removal, 2) == 0
    assert not fake.requests
