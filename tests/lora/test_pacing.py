"""Work that keeps to a share of a core while something else wants the cores."""

from __future__ import annotations

import threading
import time

import pytest

from multilora_jax.lora.host_tier import HostTier
from multilora_jax.lora.pacing import SHARE, SLICE_S, Pacer, pause_point
from multilora_jax.lora.reader import AdapterReader
from tests.lora.fake_builder import FakeBuilder, make_adapter


def burn(seconds):
    """Uses CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_thread_rests_for_what_it_used_beyond_its_share():
    slept = []
    with Pacer(lambda: True, slept.append).paced():
        pause_point()
        assert not slept  # nothing used yet
        burn(2 * SLICE_S)
        pause_point()
        pause_point()
    assert len(slept) == 1
    assert slept[0] >= 2 * SLICE_S * (1 / SHARE - 1)


@pytest.mark.parametrize("busy", [False, True])
def test_it_rests_only_while_something_else_wants_the_cores_and_only_when_paced(busy):
    slept = []
    pacer = Pacer(lambda: busy, slept.append)
    with pacer.paced():
        burn(2 * SLICE_S)
        pause_point()
    assert len(slept) == busy
    burn(2 * SLICE_S)
    pause_point()
    assert len(slept) == busy


def test_the_rests_of_several_threads_add_up():
    """So all of them together keep to the share, not each."""
    resting, most = [], []

    def sleep(seconds):
        resting.append(seconds)
        most.append(len(resting))
        time.sleep(0.01)
        resting.remove(seconds)

    pacer = Pacer(lambda: True, sleep)
    ready = threading.Barrier(3)

    def work():
        with pacer.paced():
            ready.wait()
            for _ in range(3):
                burn(SLICE_S)
                pause_point()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 9
    assert set(most) == {1}


@pytest.mark.parametrize("busy", [False, True])
def test_d17_an_adapter_is_read_at_a_share_of_a_core_while_sequences_run(busy):
    slept = []

    class Builder(FakeBuilder):
        def read(self, folder, known=None):
            burn(2 * SLICE_S)
            pause_point()
            return super().read(folder, known)

    host = HostTier()
    reader = AdapterReader(Builder(), host, pacer=Pacer(lambda: busy, slept.append))
    adapter = make_adapter()
    reader.load(adapter)
    reader.close()
    assert adapter in host
    assert len(slept) == busy
