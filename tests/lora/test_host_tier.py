"""What the host tier holds, and whom it lets go."""

from __future__ import annotations

import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from multilora_jax.errors import ConfigError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.host_tier import HostTier
from tests.lora.fake_builder import make_adapter


def pages(num_bytes: int = 100) -> np.ndarray:
    return np.zeros(num_bytes, np.uint8)


def names(host: HostTier) -> list[str]:
    return [adapter.name for adapter in host.adapters()]


def filled(host: HostTier, letters: str, **options) -> list[Adapter]:
    adapters = [make_adapter(letter) for letter in letters]
    for adapter in adapters:
        host.put(adapter, pages(), **options)
    return adapters


def test_without_limits():
    host = HostTier()
    a, b = filled(host, "ab")
    kept = pages(7)
    host.put(b, kept)
    assert host.get(b) is kept
    assert (len(host), host.bytes, host.evictions) == (2, 107, 0)
    assert a in host
    host.remove(a)
    host.remove(a)
    assert a not in host
    assert host.get(a) is None
    assert (len(host), host.bytes, host.evictions) == (1, 7, 0)


@pytest.mark.parametrize(("policy", "left"), [("lru", "adef"), ("fifo", "cdef")])
def test_who_goes_first(policy, left):
    host = HostTier(max_adapters=4, policy=policy)
    adapters = filled(host, "abcd")
    host.get(adapters[0])
    host.put(adapters[0], pages())
    others = filled(host, "ef")
    assert set(names(host)) == set(left)
    assert names(host)[-2:] == ["e", "f"]
    assert host.evictions == len(others) == 2


def test_bytes_are_bounded():
    host = HostTier(max_bytes=1000)
    a, b, c, big = (make_adapter(name) for name in "abcd")
    host.put(a, pages(400))
    host.put(b, pages(400))
    host.put(c, pages(200))
    assert (names(host), host.bytes) == (["a", "b", "c"], 1000)
    host.put(big, pages(401))
    assert (names(host), host.bytes, host.evictions) == (["c", "d"], 601, 2)
    host.put(c, pages(600))  # grew: the other goes
    assert (names(host), host.bytes, host.evictions) == (["c"], 600, 3)


def test_one_too_large_is_held_while_it_is_alone():
    host = HostTier(max_bytes=1000)
    big, small = make_adapter("big"), make_adapter("small")
    host.put(big, pages(5000))
    assert names(host) == ["big"]
    host.put(small, pages(10))
    assert (names(host), host.bytes) == (["small"], 10)


def test_kept_ones_stay_and_count():
    host = HostTier(max_adapters=3)
    kept = filled(host, "kl", keep=True)
    host.put(kept[0], pages())  # still kept
    rest = filled(host, "abc")
    assert set(names(host)) == {"k", "l", "c"}
    more = filled(host, "mn", keep=True)
    assert set(names(host)) == {"k", "l", "m", "n"}  # over the limit, and nothing to evict
    last = filled(host, "z")
    assert set(names(host)) == {"k", "l", "m", "n", "z"}
    assert host.evictions == 3
    host.remove(kept[0])
    assert kept[0] not in host
    del rest, more, last


def test_pages_go_with_their_adapter():
    host = HostTier()
    a, b = filled(host, "ab", keep=True)
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
    assert (len(host), host.bytes, names(host)) == (1, 100, ["b"])
    another = make_adapter("a")
    assert another not in host
    del b
    gc.collect()
    assert (len(host), host.bytes, host.evictions) == (0, 0, 0)


def test_the_tier_goes_without_the_collector():
    host = HostTier()
    array = pages()
    gone, a = weakref.ref(array), make_adapter()
    host.put(a, array)
    gc.disable()
    try:
        del host, array
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("limits", [{"max_adapters": 0}, {"max_bytes": 0}])
def test_limits_that_hold_nothing_are_refused(limits):
    with pytest.raises(ConfigError, match="raise it"):
        HostTier(**limits)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_books_stay_right_under_threads(policy):
    host = HostTier(max_adapters=5, max_bytes=450, policy=policy)
    adapters = [make_adapter(str(i)) for i in range(12)]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2000):
            adapter = rng.choice(adapters)
            action = rng.random()
            if action < 0.4:
                host.put(adapter, pages(rng.randint(1, 150)))
            elif action < 0.8:
                host.get(adapter)
            elif action < 0.95:
                host.remove(adapter)
            else:
                host.put(make_adapter("temporary"), pages(50))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    gc.collect()
    held = [host.get(adapter) for adapter in adapters]
    assert host.bytes == sum(array.nbytes for array in held if array is not None) <= 450
    assert len(host) == sum(array is not None for array in held) <= 5
    for adapter in adapters:
        host.remove(adapter)
    assert (len(host), host.bytes) == (0, 0)
