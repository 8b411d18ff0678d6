"""What is refused before it waits: requests, mixes and pins that could never be served, with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multilora_jax.errors import AdapterError, ConfigError, NotFoundError, UserError
from tests.engine.scheduler_bench import CONFIG, Bench, FakeAdapter


def test_check_fits_refuses_what_could_never_run():
    bench = Bench(num_pages=11, max_adapter_pages=6, max_rank_rows=16, max_loras=2)
    pinned = FakeAdapter("pinned", num_pages=1)
    bench.cache.pin(pinned)
    bench.add("fits", prompt=4, output=32)
    with pytest.raises(
        UserError, match=r"37 tokens \(4 of them its prompt\).*10 pages.*9 pages.*1 are pinned"
    ) as caught:
        bench.add("long", prompt=4, output=33)
    assert (caught.value.reason, caught.value.param) == ("request_too_large", "max_tokens")
    with pytest.raises(UserError, match="its adapters 5"):
        bench.add("with-adapter", prompt=4, output=13, adapter=FakeAdapter("x", num_pages=5))
    bench.add("with-the-pinned-one", prompt=4, output=32, adapter=pinned)  # which is not counted twice
    with pytest.raises(AdapterError, match="takes 24 rank rows but a step holds 16"):
        bench.add("rank", adapter=FakeAdapter("x", rank=17))
    with pytest.raises(AdapterError, match="takes 7 pages but adapters may hold 6"):
        bench.add("pages", adapter=FakeAdapter("x", num_pages=7))
    with pytest.raises(UserError, match="take 6 pages and the pinned ones 1, but adapters may hold 6"):
        bench.add("pages-beside-pins", adapter=FakeAdapter("x", num_pages=6))
    assert bench.scheduler.num_waiting == 2
    bench.cache.unpin(pinned)
    bench.drain()


def test_mix_that_no_step_could_hold_is_refused_with_the_numbers():
    bench = Bench(num_pages=30, max_adapter_pages=6, max_rank_rows=24, max_loras=3)
    a, b, c, d = (FakeAdapter(name) for name in "abcd")
    with pytest.raises(UserError, match="mixes 4 adapters but a step holds 3") as caught:
        bench.add("many", adapter=(a, b, c, d))
    assert (caught.value.reason, caught.value.param) == ("mix_too_large", "max_loras")
    with pytest.raises(UserError, match="take 32 rank rows together but a step holds 24") as caught:
        bench.add("rows", adapter=(a, FakeAdapter("wide", rank=20)))
    assert (caught.value.reason, caught.value.param) == ("mix_too_large", "max_rank_rows")
    with pytest.raises(UserError, match="take 7 pages and the pinned ones 0, but adapters may hold 6") as caught:
        bench.add("pages", adapter=(a, FakeAdapter("big", num_pages=5)))
    assert (caught.value.reason, caught.value.param) == ("adapter_too_large", "pool_pages")
    with pytest.raises(UserError, match="names an adapter twice") as caught:
        bench.add("twice", adapter=(a, a))
    assert caught.value.reason == "duplicate_adapter"
    assert not bench.scheduler._live
    bench.add("three", adapter=(a, b, c))
    bench.drain()


def test_pin_that_would_strand_a_live_request_is_refused_with_the_numbers():
    bench = Bench(num_pages=11, max_adapter_pages=6)
    x, y, z = FakeAdapter("x", num_pages=2), FakeAdapter("y", num_pages=3), FakeAdapter("z", num_pages=1)
    seq = bench.add("long", prompt=4, output=24, adapter=x)  # 7 pages and x's 2 of 10
    bench.step()
    with pytest.raises(
        UserError, match=r"'y' \(3 pages\).*to 3, but request 'long' was promised 7 pages.* 2 "
    ) as caught:
        bench.scheduler.check_pin(y)
    assert (caught.value.reason, caught.value.param) == ("pin_limit", "lora_name")
    for adapter in (x, z):  # x is the request's own: its pages are promised already
        bench.scheduler.check_pin(adapter)
        bench.cache.pin(adapter)
        bench.scheduler.check_pin(adapter)
    with pytest.raises(UserError, match="the pinned pages to 5, but"):
        bench.scheduler.check_pin(FakeAdapter("w", num_pages=2))
    while not seq.finished:
        bench.step()
    bench.scheduler.check_pin(y)
    bench.cache.pin(y)
    with pytest.raises(UserError, match="to 7 of 6 that adapters may hold and 10 in the pool"):
        bench.scheduler.check_pin(FakeAdapter("w", num_pages=1))
    bench.cache.drop(y)
    with pytest.raises(NotFoundError, match="'y' was unloaded"):
        bench.scheduler.check_pin(y)
    bench.cache.unpin(x)
    bench.cache.unpin(z)
    bench.drain()


def test_pin_that_would_leave_no_page_at_all_is_refused():
    bench = Bench(num_pages=5)
    with pytest.raises(UserError, match="to 4 of 4 that adapters may hold and 4 in the pool"):
        bench.scheduler.check_pin(FakeAdapter("x", num_pages=4))
    bench.scheduler.check_pin(FakeAdapter("x", num_pages=3))


def test_duplicate_request_id_is_refused_while_the_first_lives():
    bench = Bench()
    bench.add("a")
    with pytest.raises(UserError, match="'a' is in use") as caught:
        bench.add("a")
    assert caught.value.reason == "duplicate_request_id"
    bench.drain()
    bench.add("a")
    bench.drain()
    assert bench.finished == ["a", "a"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("max_num_batched_tokens", 7), ("prefill_block", 0), ("row_block", 0), ("max_loras", 0)],
)
def test_budgets_out_of_range_are_refused(name: str, value: int):
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        replace(CONFIG, **{name: value})
