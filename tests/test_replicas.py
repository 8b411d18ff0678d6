"""Several engines behind one, over fake engines: placement, adapters everywhere, one figure, one death."""

from __future__ import annotations

import asyncio

import pytest

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.engine.metrics import PHASES, EngineStats
from multilora_jax.engine.replica_stats import merge_stats
from multilora_jax.engine_vitals import EngineDeadError
from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.memory.allocator import PageKind
from multilora_jax.replicas import ReplicatedEngine
from multilora_jax.request import LoRARequest, SamplingParams
from multilora_jax.server.live import LiveView
from multilora_jax.server.metrics import ServerMetrics
from tests.server.fake_engine import GOLDEN, PAGES
from tests.server.pool_engine import PoolEngine
from tests.test_async_engine import last, wait_for

pytestmark = pytest.mark.anyio

FOLDERS = {"a": "all_linear", "b": "attn_only", "c": "qv"}
LONG = SamplingParams(max_tokens=5000)


def lora(name, **options):
    return LoRARequest(name, ord(name), str(GOLDEN / "cases" / FOLDERS[name]), **options)


@pytest.fixture
def two(make_engine):
    """(engine of two replicas, their fake engines)."""
    pairs = [make_engine(step_seconds=0.001) for _ in range(2)]
    return ReplicatedEngine([engine for engine, _ in pairs]), [fake for _, fake in pairs]


def names_of(fake):
    return [adapter.name for request in list(fake.requests.values()) for adapter in request.adapters]


async def test_requests_of_an_adapter_go_to_one_replica(two):
    engine, fakes = two
    for name in "ab":
        await engine.register_lora(lora(name))
    order = "abbaabab"
    streams = [await engine.submit("hi", LONG, f"r{i}", lora_request=lora(n)) for i, n in enumerate(order)]
    assert sorted(names_of(fakes[0]) + names_of(fakes[1])) == sorted(order)
    assert {len(set(names_of(fake))) for fake in fakes} == {1}
    assert engine.num_live_requests == len(order)
    for i in range(len(order)):
        assert await engine.abort(f"r{i}")
    for stream in streams:
        outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].finish_reason == "abort"


async def test_a_full_replica_hands_an_adapter_on(two):
    engine, fakes = two
    seats = engine.engine.config.max_num_seqs
    await engine.register_lora(lora("a"))
    for i in range(seats + 1):
        await engine.submit("hi", LONG, f"r{i}", lora_request=lora("a"))
    await wait_for(lambda: sorted(len(fake.requests) for fake in fakes) == [1, seats])
    engine.shutdown(drain=False)


async def test_base_requests_spread_and_ids_are_unique_over_all(two):
    engine, fakes = two
    for i in range(6):
        await engine.submit("hi", LONG, f"r{i}")
    assert [len(fake.requests) for fake in fakes] == [3, 3]
    for i in range(6):
        with pytest.raises(UserError, match="is in use"):
            await engine.submit("hi", LONG, f"r{i}")
    engine.shutdown(drain=False)


async def test_adapters_are_known_to_every_replica(two):
    engine, fakes = two
    added = await engine.add_lora(lora("a"), pinned=True)
    assert added.name == "a"
    assert [[adapter.name for adapter in fake.list_loras()] for fake in fakes] == [["a"], ["a"]]
    assert sum(pinned for *_, pinned in (await engine.stats()).tiers) == 1
    await engine.unpin_lora("a")
    await engine.prepare(lora("b"))
    assert await engine.remove_lora("a") == 0
    assert all("a" not in [adapter.name for adapter in fake.list_loras()] for fake in fakes)
    with pytest.raises(NotFoundError):
        await engine.remove_lora("a")


async def test_the_first_replica_knows_what_another_is_to_answer_with(two):
    engine, fakes = two
    await engine.submit("hi", LONG, "busy")  # on the first
    await engine.register_lora(lora("a"))
    await engine.prepare(lora("a"))
    assert [adapter.version is not None for adapter in engine.list_loras()] == [True]
    await engine.submit("hi", LONG, "r", lora_request=lora("a"))
    assert (names_of(fakes[0]), names_of(fakes[1])) == ([], ["a"])


async def test_a_refused_adapter_is_known_to_none(two):
    engine, fakes = two
    fakes[1].remove_lora = lambda name: None
    await engine.replicas[1].register_lora(lora("c"))  # the second has the name already
    with pytest.raises(UserError):
        await engine.register_lora(LoRARequest("c", 9, str(GOLDEN / "cases" / "rank1")))
    assert fakes[0].list_loras() == []


@pytest.mark.parametrize("home", [0, 1])
async def test_a_replacement_that_is_refused_is_made_nowhere(two, home):
    """There may be no room to pin it: every replica goes on with the version before."""
    engine, fakes = two
    for number in range(home + 1):
        await engine.add_lora(lora("ab"[number]))  # each goes to the emptiest
        await engine.submit("hi", LONG, f"r{number}", lora_request=lora("ab"[number]))
    name = "ab"[home]
    versions = [fake.adapters.registry.get(name).digest for fake in fakes]

    def refuse(*_, **__):
        raise UserError("no room", reason="pin_limit")

    fakes[home].add_lora = refuse
    other = LoRARequest(name, ord(name), str(GOLDEN / "cases" / "rank1"), load_inplace=True)
    with pytest.raises(UserError, match="no room"):
        await engine.add_lora(other, pinned=True)
    assert [fake.adapters.registry.get(name).digest for fake in fakes] == versions
    engine.shutdown(drain=False)


async def test_figures_add_up_and_are_labelled_by_replica(two):
    engine, _ = two
    outputs = await asyncio.gather(
        *(last(engine.generate("hi", SamplingParams(max_tokens=4), f"r{i}")) for i in range(4))
    )
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
    stats = await engine.stats()
    assert stats.generation_tokens == 16
    assert [part.generation_tokens for part in stats.replicas] == [8, 8]
    text = ServerMetrics("base", None).render(stats, engine.engine).decode()
    assert 'vllm:generation_tokens_total{model_name="base"} 16.0' in text
    for number in "01":
        assert f'multilora:replica_generation_tokens_total{{model_name="base",replica="{number}"}} 8.0' in text


async def test_one_dead_replica_makes_all_unhealthy(two):
    engine, fakes = two
    assert engine.healthy
    fakes[1].fail_step = RuntimeError("boom")
    streams = [await engine.submit("hi", SamplingParams(max_tokens=3), f"r{i}") for i in range(2)]
    results = await asyncio.gather(*(last(stream) for stream in streams), return_exceptions=True)
    assert sum(isinstance(result, EngineDeadError) for result in results) == 1
    assert not engine.healthy


async def test_the_page_shows_the_pools_of_all_replicas():
    fakes = [PoolEngine() for _ in range(2)]
    engine = ReplicatedEngine([AsyncEngine(fake) for fake in fakes])  # type: ignore[arg-type]
    await engine.register_lora(lora("a"))
    await last(engine.generate("hi", SamplingParams(max_tokens=2), "r", lora_request=lora("a")))
    fakes[1].allocator.allocate(3, PageKind.KV)
    state = await LiveView(engine).look()  # type: ignore[arg-type]
    assert (state["pool"]["cells"], state["pool"]["pages"]) == (2 * PAGES, 2 * PAGES)
    assert (PAGES, 3, 1, 1) in state["pool"]["runs"]
    assert [row["name"] for row in state["adapters"]["rows"]] == ["a"]
    engine.shutdown(drain=False)


async def test_troubles_and_checks_are_those_of_any_replica(two):
    engine, fakes = two
    assert engine.trouble is None
    assert (await engine.examine_lora(str(GOLDEN / "cases" / "qv"))).version is not None
    fakes[1].fail_step = KeyboardInterrupt()
    streams = [await engine.submit("hi", SamplingParams(max_tokens=3), f"r{i}") for i in range(2)]
    await asyncio.gather(*map(last, streams), return_exceptions=True)
    assert engine.trouble == "engine_dead"
    assert [replica.trouble for replica in engine.replicas] == [None, "engine_dead"]


def test_figures_by_size_and_by_phase_add_up():
    one, other = EngineStats(num_running=1), EngineStats()
    one.add_step(0.5, 3, [0.1] * len(PHASES))
    other.add_step(0.25, 300, [0.2] * len(PHASES))
    merged = merge_stats([one, other])
    assert (merged.steps, merged.step_seconds, merged.step_tokens, merged.num_running) == (2, 0.75, 303, 1)
    assert sum(merged.steps_by_tokens) == 2
    assert merged.phase_seconds == pytest.approx([0.3] * len(PHASES))
