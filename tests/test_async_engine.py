"""AsyncEngine over a fake engine: hand-over between the threads, aborts, failures, shutdown."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from multilora_jax.async_engine import EngineDeadError
from multilora_jax.errors import UnavailableError, UserError
from multilora_jax.request import LoRARequest, SamplingParams
from tests.server.fake_engine import GOLDEN

pytestmark = pytest.mark.anyio

ADAPTER = str(GOLDEN / "cases" / "all_linear")
LONG = 5000


async def last(generator):
    return [output async for output in generator][-1]


async def wait_for(condition, seconds=2.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time allowed"
        await asyncio.sleep(0.005)


async def test_generate_yields_growing_outputs_up_to_the_finished_one(make_engine):
    engine, _ = make_engine(step_seconds=0.01)
    outputs = [o async for o in engine.generate("hi", SamplingParams(max_tokens=8), "r1")]
    texts = [o.outputs[0].text for o in outputs]
    assert texts[-1] == "base:abc"
    assert len(texts) > 3
    assert all(b.startswith(a) and a != b for a, b in pairwise(texts))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


async def test_many_requests_at_once_each_get_their_own(make_engine):
    engine, fake = make_engine()
    fake.script = {f"p{i}": b"answer %d" % i for i in range(40)}
    calls = [last(engine.generate(f"p{i}", SamplingParams(max_tokens=50), f"r{i}")) for i in range(40)]
    for i, output in enumerate(await asyncio.gather(*calls)):
        assert (output.request_id, output.outputs[0].text) == (f"r{i}", f"answer {i}")
    assert engine.num_live_requests == 0


async def test_a_flood_of_commands_holds_no_batch_up(make_engine, monkeypatch):
    """They take turns with steps, each turn as long as the first command at least."""
    monkeypatch.setattr("multilora_jax.async_engine.TURN_S", 0.0)
    engine, fake = make_engine()
    log, step = [], fake.step
    fake.step = lambda: (log.append("step"), step())[1]
    await engine.submit("hi", SamplingParams(max_tokens=LONG, ignore_eos=True), "r1")
    fake.gate.clear()  # the thread is held in a step until all are in the queue
    await wait_for(lambda: log)
    log.clear()
    for number in range(5):
        engine._commands.put(lambda number=number: log.append(number))
    fake.gate.set()
    await wait_for(lambda: 4 in log, 30)
    turns = [log[i + 1] for i, entry in enumerate(log[:-1]) if isinstance(entry, int) and entry < 4]
    assert turns == ["step"] * 4
    assert [entry for entry in log if isinstance(entry, int)] == [0, 1, 2, 3, 4]


async def test_prompts_may_be_ids_or_dicts(make_engine):
    engine, _ = make_engine()
    for i, prompt in enumerate(([72, 73], {"prompt_token_ids": [72, 73]}, {"prompt": "HI"})):
        output = await last(engine.generate(prompt, SamplingParams(max_tokens=1), f"r{i}"))
        assert output.prompt_token_ids[-2:] == [72, 73]


async def test_a_slow_reader_skips_states_and_loses_no_text(make_engine):
    engine, _ = make_engine()
    stream = await engine.submit("hi", SamplingParams(max_tokens=200), "r1")
    await wait_for(lambda: engine.num_live_requests == 0)
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert len(outputs[0].outputs[0].token_ids) == 200


async def test_a_bad_request_fails_alone_and_before_any_output(make_engine):
    engine, _ = make_engine(step_seconds=0.005)
    good = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=40), "good")))
    with pytest.raises(UserError, match="token id out of range"):
        await engine.submit([999], SamplingParams(), "bad")
    with pytest.raises(TypeError, match="a bug"):
        await engine.submit("BUG", SamplingParams(), "bug")
    assert len((await good).outputs[0].token_ids) == 40
    assert engine.healthy
    assert engine.num_live_requests == 0


async def test_a_request_id_is_unique_among_live_requests(make_engine):
    engine, fake = make_engine()
    fake.gate.clear()
    first = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=2), "same")))
    await wait_for(lambda: engine.num_live_requests == 1)
    with pytest.raises(UserError) as caught:
        await engine.submit("ho", SamplingParams(), "same")
    assert caught.value.reason == "duplicate_request_id"
    fake.gate.set()
    assert (await first).finished
    assert (await last(engine.generate("hi", SamplingParams(max_tokens=2), "same"))).finished


async def test_d14_closing_the_generator_aborts(make_engine):
    engine, fake = make_engine(step_seconds=0.002)
    generator = engine.generate("hi", SamplingParams(max_tokens=LONG), "r1")
    await anext(generator)
    assert "r1" in fake.requests
    await generator.aclose()
    await wait_for(lambda: not fake.requests)
    assert engine.num_live_requests == 0


async def test_d14_cancelling_the_caller_aborts_running_and_waiting_requests(make_engine):
    engine, fake = make_engine(step_seconds=0.002, max_num_seqs=1)
    calls = [
        asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=LONG), f"r{i}"))) for i in range(3)
    ]
    await wait_for(lambda: len(fake.requests) == 3)
    for call in calls:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await wait_for(lambda: not fake.requests)
    assert engine.num_live_requests == 0


async def test_d14_cancelling_before_admission_leaves_nothing(make_engine):
    engine, fake = make_engine(step_seconds=0.002)
    fake.gate.clear()
    first = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=3), "r1")))
    await wait_for(lambda: fake.held)
    second = asyncio.create_task(engine.submit("ho", SamplingParams(max_tokens=LONG), "r2"))
    await wait_for(lambda: engine.num_live_requests == 2)
    second.cancel()
    fake.gate.set()
    await first
    await wait_for(lambda: not fake.requests and engine.num_live_requests == 0)


async def test_a_late_abort_does_not_hit_a_newer_request_of_the_same_id(make_engine):
    engine, _ = make_engine()
    old = await engine.submit("hi", SamplingParams(max_tokens=3), "same")
    await wait_for(lambda: engine.num_live_requests == 0)
    new = await engine.submit("hi", SamplingParams(max_tokens=300), "same")
    engine._post_abort(old)
    assert len((await new.final()).outputs[0].token_ids) == 300


async def test_abort_by_id_ends_the_stream_with_what_there_is(make_engine):
    engine, fake = make_engine(step_seconds=0.002)
    seen = []
    engine.add_observer(seen.append)
    stream = await engine.submit("hi", SamplingParams(max_tokens=LONG), "r1")
    await anext(stream)
    assert await engine.abort("r1")
    output = await stream.final()
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text.startswith("base:"[: len(output.outputs[0].text)])
    assert not fake.requests
    assert seen[-1] is output
    assert not await engine.abort("r1")


async def test_a_failing_observer_harms_nobody(make_engine, caplog):
    engine, _ = make_engine()
    engine.add_observer(lambda output: 1 / 0)
    assert (await last(engine.generate("hi", SamplingParams(max_tokens=3), "r1"))).finished
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
async def test_d27_an_engine_that_dies_fails_everybody_and_is_unhealthy(make_engine):
    engine, fake = make_engine(step_seconds=0.002, max_num_seqs=1)
    calls = [
        asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=LONG), f"r{i}"))) for i in range(3)
    ]
    await wait_for(lambda: len(fake.requests) == 3)
    assert engine.healthy
    fake.fail_step = RuntimeError("device lost")
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert len({id(result) for result in results}) == 3
    assert not engine.healthy
    with pytest.raises(EngineDeadError, match="RuntimeError"):
        await engine.submit("hi", SamplingParams(), "later")
    with pytest.raises(EngineDeadError):
        await engine.add_lora(LoRARequest("a", 1, ADAPTER))
    assert (await engine.stats()).num_running == 0


async def test_d27_a_step_that_hangs_is_unhealthy_until_it_ends(make_engine):
    engine, fake = make_engine(stall_after_s=0.05)
    fake.gate.clear()
    call = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=3), "r1")))
    await wait_for(lambda: not engine.healthy)
    fake.gate.set()
    await call
    assert engine.healthy


async def test_an_idle_engine_does_not_spin(make_engine):
    engine, fake = make_engine()
    await last(engine.generate("hi", SamplingParams(max_tokens=3), "r1"))
    steps = fake.counts.steps
    before = time.process_time()
    await asyncio.sleep(0.3)
    assert time.process_time() - before < 0.15
    assert fake.counts.steps == steps


async def test_stats_are_read_between_steps_and_do_not_wait_for_a_hanging_one(make_engine):
    engine, fake = make_engine(max_num_seqs=1)
    fake.gate.clear()
    calls = [asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=2), f"r{i}"))) for i in range(2)]
    await wait_for(lambda: fake.held)
    started = time.monotonic()
    assert (await engine.stats(timeout_s=0.05)).num_running == 0  # never read yet
    assert time.monotonic() - started < 1
    fake.gate.set()
    await asyncio.gather(*calls)
    assert (await engine.stats()).steps == 4


async def test_shutdown_drains_and_refuses_new_requests(make_engine):
    engine, _ = make_engine(step_seconds=0.005)
    call = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=40), "r1")))
    await wait_for(lambda: engine.num_live_requests == 1)
    stopping = asyncio.create_task(asyncio.to_thread(engine.shutdown, True, 20.0))
    await asyncio.sleep(0.02)
    with pytest.raises(UnavailableError) as caught:
        await engine.submit("hi", SamplingParams(), "r2")
    assert caught.value.reason == "shutting_down"
    assert len((await call).outputs[0].token_ids) == 40
    await stopping
    assert not engine.healthy


async def test_shutdown_cuts_off_what_outlasts_the_timeout(make_engine):
    engine, fake = make_engine(step_seconds=0.002)
    call = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=LONG), "r1")))
    await wait_for(lambda: engine.num_live_requests == 1)
    await asyncio.to_thread(engine.shutdown, True, 0.05)
    with pytest.raises(UnavailableError, match="shut down"):
        await call
    assert not fake.requests


def test_requests_of_a_closed_event_loop_are_aborted(make_engine):
    engine, fake = make_engine(step_seconds=0.001)

    async def leave() -> None:
        await engine.submit("hi", SamplingParams(max_tokens=LONG), "r1")

    asyncio.run(leave())
    deadline = time.monotonic() + 2
    while fake.requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not fake.requests
    assert engine.healthy
