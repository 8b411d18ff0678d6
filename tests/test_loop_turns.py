"""Turns that the engine thread takes with event loops."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from multilora_jax import loop_turns
from multilora_jax.loop_turns import ARRIVAL_TURNS, let_arrive, let_send, post, wake_all
from multilora_jax.request import CompletionOutput, RequestOutput, SamplingParams
from multilora_jax.request_stream import RequestStream

AGES_S = 300.0
"""Longer than any machine stops for."""


@pytest.fixture
def loop():
    """An event loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def stream_of(loop, name="r"):
    return RequestStream(name, frozenset(), loop, lambda stream: None, 0.0)


def output(text):
    return RequestOutput("r", None, [], None, [CompletionOutput(0, text, [])], False)


def after_turns(loop, turns, callback):
    """Runs a callback on the loop in the turn of that number, from 0; each takes its time."""
    if turns:
        time.sleep(0.005)
        loop.call_soon(after_turns, loop, turns - 1, callback)
    else:
        callback()


def test_what_was_put_out_is_read_before_the_next_step(loop):
    streams = [stream_of(loop, f"r{i}") for i in range(3)]
    read = []

    async def reader(stream):
        async for state in stream:
            time.sleep(0.01)  # a send that takes its time
            read.append(state.outputs[0].text)

    readers = [asyncio.run_coroutine_threadsafe(reader(stream), loop) for stream in streams]
    for text in "abc":
        for stream in streams:
            stream.newest = output(text)
        assert wake_all(streams) == []
        let_send(streams, AGES_S)
        assert read == [text] * 3
        read.clear()
    for future in readers:
        future.cancel()


def test_a_loop_that_is_slow_holds_no_step_up_for_long(loop):
    release = threading.Event()
    post(loop, release.wait)
    let_send([stream_of(loop)], 0.02)  # returns though the loop cannot
    let_arrive(lambda: [stream_of(loop)], lambda: None)
    assert not release.is_set()
    release.set()


def test_a_closed_loop_is_not_waited_for():
    loop = asyncio.new_event_loop()
    loop.close()
    stream = stream_of(loop)
    assert wake_all([stream]) == [stream]
    let_send([stream], AGES_S)


def test_requests_that_come_together_are_taken_in_together(loop, monkeypatch):
    """Each next one comes as many turns later as it takes to become a request."""
    monkeypatch.setattr(loop_turns, "ARRIVAL_S", AGES_S)
    known, taken, begun = [stream_of(loop)], [], []

    def streams():
        if not begun:
            begun.append(post(loop, lambda: after_turns(loop, ARRIVAL_TURNS, arrive)))
        return known

    def arrive():
        known.append(stream_of(loop))
        if len(known) < 6:
            after_turns(loop, ARRIVAL_TURNS, arrive)

    let_arrive(streams, lambda: taken.append(len(known)))
    assert len(known) == 6
    assert taken[-1] == 6


def test_nobody_is_waited_for_where_there_is_no_request():
    taken = []
    let_arrive(list, lambda: taken.append(True))
    assert not taken


@pytest.mark.anyio
async def test_an_engine_waits_before_a_first_step_and_after_each(make_engine, monkeypatch):
    engine, fake = make_engine()
    log, step = [], fake.step
    fake.step = lambda: (log.append("step"), step())[1]
    for name in ("let_arrive", "let_send"):
        real = getattr(loop_turns, name)
        monkeypatch.setattr(
            f"multilora_jax.async_engine.{name}", lambda *a, name=name, real=real: (log.append(name), real(*a))
        )
    stream = await engine.submit("hi", SamplingParams(max_tokens=3, ignore_eos=True), "r1")
    await stream.final()
    engine.shutdown()
    assert log[:7] == ["let_arrive", "step", "let_send", "step", "let_send", "step", "let_send"]
