"""What /health is told: an engine thread that is dead, hangs, or fails all its steps (D27)."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from multilora_jax import engine_vitals
from multilora_jax.engine_vitals import FAILING_AFTER, Vitals
from multilora_jax.errors import UnavailableError
from multilora_jax.request import SamplingParams
from tests.server.harness import wait_for

pytestmark = pytest.mark.anyio


async def last(generator):
    return [output async for output in generator][-1]


def recovering(fake, failures):
    """Makes steps of a FakeEngine fail so often, and recover as the real one does."""
    step, left = fake.step, [failures]

    def failing():
        if left[0]:
            left[0] -= 1
            raise RuntimeError("device lost")
        return step()

    fake.step, fake.recover = failing, list
    return left


async def test_d27_a_failed_step_that_is_recovered_from_kills_nobody(make_engine, caplog):
    engine, fake = make_engine()
    recovering(fake, 3)
    calls = [last(engine.generate("hi", SamplingParams(max_tokens=4), f"r{i}")) for i in range(3)]
    assert [output.outputs[0].finish_reason for output in await asyncio.gather(*calls)] == ["length"] * 3
    assert engine.healthy
    failed = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(failed) == 3
    assert all("device lost" in str(record.exc_info) for record in failed)


async def test_d27_steps_that_all_fail_are_unhealthy_until_one_succeeds(make_engine):
    engine, fake = make_engine(step_seconds=0.002)
    left = recovering(fake, 10**6)
    call = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=4), "r")))
    await wait_for(lambda: not engine.healthy)
    assert engine.trouble == "engine_failing"
    left[0] = 0
    assert (await call).finished
    assert engine.healthy


async def test_d27_a_command_that_hangs_is_unhealthy_too_and_new_requests_are_refused(make_engine):
    """Whatever holds up the engine thread: here a request's entry, not a step."""
    engine, fake = make_engine(stall_after_s=0.05)
    add, calls = fake.add_request, []
    fake.add_request = lambda *args: calls.append(fake.gate.wait()) or add(*args)
    fake.gate.clear()
    first = asyncio.create_task(last(engine.generate("hi", SamplingParams(max_tokens=4), "r1")))
    await wait_for(lambda: engine.trouble == "engine_stalled")
    with pytest.raises(UnavailableError, match="hangs") as caught:
        await engine.submit("hi", SamplingParams(max_tokens=4), "r2")
    assert caught.value.reason == "engine_stalled"
    fake.gate.set()
    assert (await first).finished
    assert (await last(engine.generate("hi", SamplingParams(max_tokens=4), "r3"))).finished


async def test_an_idle_engine_is_healthy_however_long(make_engine):
    engine, _ = make_engine(stall_after_s=0.05)
    assert (await last(engine.generate("hi", SamplingParams(max_tokens=2), "r"))).finished
    await asyncio.sleep(0.2)
    assert engine.healthy


def test_the_wall_clock_has_no_say(monkeypatch):
    vitals = Vitals()
    vitals.busy()
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert vitals.trouble(10.0) is None
    monkeypatch.setattr(engine_vitals.time, "monotonic", lambda: 1e12)
    assert vitals.trouble(10.0) == "engine_stalled"
    vitals.rest()
    assert vitals.trouble(10.0) is None
    for _ in range(FAILING_AFTER):
        assert vitals.trouble(10.0) is None
        vitals.failed()
    assert vitals.trouble(10.0) == "engine_failing"
    vitals.stepped()
    assert vitals.trouble(10.0) is None
