"""Faults that are known from other servers, each in batches of 1, 3 and 17 requests on one warmed-up engine.

What an answer must be comes from PEFT's own numbers (golden_tiny) or from the same request alone. After every test the
engine is empty, its pages are accounted for, and nothing was compiled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.errors import AdapterError, NotFoundError, StepFailedError, UserError
from multilora_jax.request import LoRARequest, SamplingParams
from tests.tiny_engine import TINY_MODEL, Request, greedy, make_engine, run_all, tiny_engine, tokens_of

GOLDEN = Path(__file__).parent.parent / "data" / "golden_tiny"
CASES = {
    "d01": ["rslora", "rslora_rank_pattern"],
    "d02": ["rank_alpha_pattern", "rslora_rank_pattern"],
    "d03": ["regex_targets", "fullname_targets", "exclude_modules"],
    "d04": ["dora", "modules_to_save_norm", "lm_head_tied", "embed_tied"],
    "d05": ["qv", "attn_only", "layers_to_transform"],
    "d08": ["all_linear", "qv"],
    "d12": ["rank1", "rank64", "rank_alpha_pattern"],
}
"""Fault: adapters of the base "tied" that showed it."""

CONTEXT = 128
LENGTHS = [3, 17, 40, 16, 33]
by_size = pytest.mark.parametrize("size", [1, 3, 17])


def lora(name: str, **fields: Any) -> LoRARequest:
    number = sorted(path.name for path in (GOLDEN / "cases").iterdir()).index(name) + 1
    return LoRARequest(name, number, str(GOLDEN / "cases" / name), **fields)


def prompt_of(number: int) -> list[int]:
    return [(11 * number + 37 * i) % 250 + 3 for i in range(LENGTHS[number % len(LENGTHS)])]


def cycle(values: list[Any], size: int) -> list[Any]:
    return list(itertools.islice(itertools.cycle(values), size))


def start(engine: Any, requests: list[Request], name: str = "r", **options: Any) -> list[str]:
    ids = [f"{name}{number}" for number in range(len(requests))]
    for request_id, request in zip(ids, requests, strict=True):
        engine.add_request(request_id, *request, **options)
    return ids


def finish(engine: Any, done: dict[str, Any] | None = None, steps: int | None = None) -> dict[str, Any]:
    """Runs to the end, or so many steps; the newest output of each request."""
    done = {} if done is None else done
    while engine.has_unfinished_requests() and steps != 0:
        done |= {output.request_id: output for output in engine.step()}
        steps = steps and steps - 1
    return done


def alone(engine: Any, requests: list[Request]) -> list[Any]:
    """Each request by itself, and with no cached prefix."""
    outputs = []
    for request in requests:
        start(engine, [request], "alone", cache_salt=f"alone {next(SALTS)}")
        outputs += finish(engine).values()
    return outputs


SALTS = itertools.count()


@pytest.fixture(scope="module")
def shared():
    engine = make_engine(
        GOLDEN / "bases" / "tied", tokenizer=TINY_MODEL, max_num_seqs=17, max_model_len=CONTEXT, prompt_lookup_min=1
    )
    engine.warm_up()
    return engine


@pytest.fixture
def engine(shared):
    yield shared
    assert not shared.has_unfinished_requests()
    shared.check_integrity()
    stats = shared.stats()
    assert (stats.compilations, stats.pages_kv, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)


def check_against_peft(engine, names, size, new_tokens=12):
    """`size` answers, the adapters and the base in turn, are PEFT's."""
    expected = {name: load_file(GOLDEN / "cases" / name / "expected.safetensors") for name in names}
    expected[None] = load_file(Path(engine.config.model) / "expected.safetensors")
    jobs = cycle([(name, i) for i in (2, 1, 0) for name in (*names, None)], size)
    requests = [
        Request(expected[name][f"prompt.{i}"].tolist(), greedy(new_tokens), name and lora(name)) for name, i in jobs
    ]
    found = tokens_of(run_all(engine, requests))
    wanted = [expected[name][f"greedy.{i}"].tolist()[:new_tokens] for name, i in jobs]
    assert found == wanted, [job for job, a, b in zip(jobs, found, wanted, strict=True) if a != b]


@by_size
@pytest.mark.parametrize("fault", CASES)
def test_d01_d02_d03_d04_d05_d08_d12_answers_are_peft_s(engine, fault, size):
    check_against_peft(engine, CASES[fault], size)


def test_d11_scaled_rope_at_every_size():
    engine = make_engine(GOLDEN / "bases" / "llama3rope", max_num_seqs=17, max_model_len=CONTEXT)
    for size in (1, 3, 17):
        check_against_peft(engine, ["llama3rope_all"], size, new_tokens=24)


@by_size
def test_d06_d18_bad_adapters_and_unknown_names_disturb_nobody(engine, tmp_path, size):
    requests = [Request(prompt_of(i), greedy(8), lora("qv") if i % 2 else None) for i in range(size)]
    wanted = tokens_of(alone(engine, requests))
    (tmp_path / "adapter_config.json").write_bytes((GOLDEN / "cases" / "qv" / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    ids, names = start(engine, requests), [adapter.name for adapter in engine.list_loras()]
    done = finish(engine, steps=3)
    with pytest.raises(AdapterError):
        engine.add_lora(LoRARequest("bad", 900, str(tmp_path)))
    with pytest.raises(NotFoundError):
        engine.add_request("unknown", prompt_of(0), greedy(2), LoRARequest("qw", 901))
    assert [adapter.name for adapter in engine.list_loras()] == names
    done = finish(engine, done)
    assert tokens_of(done[request_id] for request_id in ids) == wanted


@by_size
def test_d09_a_common_prefix_is_shared_within_an_adapter_only(engine, size):
    prompt = [(7 * i) % 200 + 3 for i in range(70)]
    users = cycle([None, lora("qv"), lora("all_linear"), lora("qv", scale=0.5)], size)
    requests = [Request([*prompt, 3 + i], greedy(6), user) for i, user in enumerate(users)]
    wanted, salt = tokens_of(alone(engine, requests)), f"d09 {size}"
    for cached in (0, 64):
        ids = start(engine, requests, cache_salt=salt)
        done = finish(engine)
        outputs = [done[request_id] for request_id in ids]
        assert tokens_of(outputs) == wanted
        # Those that follow another of the same adapter may find its pages even in the first round.
        assert {output.num_cached_tokens for output in outputs[:4]} == {cached}


@by_size
def test_d13_adapters_that_come_and_go_leave_nothing(engine, size):
    base = engine.stats()
    names = cycle(["qv", "rank1", "attn_only"], size)
    loras = [LoRARequest(f"d13 {i}", 1000 + i, str(GOLDEN / "cases" / name)) for i, name in enumerate(names)]
    for _ in range(2):
        ids = start(engine, [Request(prompt_of(0), greedy(4), each) for each in loras])
        done = finish(engine, steps=2)
        for each in loras:
            engine.remove_lora(each.lora_name)
        done = finish(engine, done)
        assert all(len(done[request_id].outputs[0].token_ids) == 4 for request_id in ids)
        after = engine.stats()
        assert (after.registered_adapters, after.pages_adapter) == (base.registered_adapters, base.pages_adapter)
        assert (after.host_adapters, after.host_adapter_bytes) == (base.host_adapters, base.host_adapter_bytes)


@by_size
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_d14_aborts_free_their_pages_and_disturb_nobody(engine, size, steps):
    requests = [
        Request(prompt_of(i), SamplingParams(max_tokens=9, seed=i, ignore_eos=True, n=1 + i % 3), lora("qv"))
        for i in range(size)
    ]
    wanted = alone(engine, requests)
    ids, gone = start(engine, requests), start(engine, requests, "gone")
    done = finish(engine, steps=steps)
    assert all(map(engine.abort_request, gone))
    engine.check_integrity()
    finish(engine, done)
    for request_id, output in zip(ids, wanted, strict=True):
        assert [c.token_ids for c in done[request_id].outputs] == [c.token_ids for c in output.outputs]
    assert not any(done[request_id].finished for request_id in gone if request_id in done)


@pytest.fixture(scope="module")
def two_slots(shared):
    return make_engine(
        GOLDEN / "bases" / "tied", tokenizer=TINY_MODEL, max_num_seqs=17, max_model_len=CONTEXT, max_loras=2
    )


@by_size
def test_d15_d16_more_adapters_than_slots_and_nobody_idles_behind_them(two_slots, shared, size):
    names = cycle(["qv", "rank1", "attn_only", "rslora", None], size)
    requests = [Request(prompt_of(i), greedy(6), name and lora(name)) for i, name in enumerate(names)]
    wanted = tokens_of(alone(shared, requests))
    blockers = start(two_slots, [Request(prompt_of(0), greedy(40), lora(name)) for name in ("dora", "exclude_modules")])
    finish(two_slots, done := {}, steps=4)
    ids = start(two_slots, requests, "n")
    behind = start(two_slots, [Request(prompt_of(0), greedy(3), user) for user in (None, lora("dora"))], "behind")
    while not all(request_id in done and done[request_id].finished for request_id in behind):
        finish(two_slots, done, steps=1)
        assert len({a for e in two_slots.scheduler._running.values() for a in e.seq.adapters}) <= 2
    assert not any(done[request_id].finished for request_id in blockers)  # the base and a resident one ran meanwhile
    finish(two_slots, done)
    assert tokens_of(done[request_id] for request_id in ids) == wanted
    two_slots.check_integrity()


@by_size
def test_d17_d22_d23_swaps_and_unloads_under_traffic(engine, size):
    """Those that run finish on the version they began with, those that come later get the new one, others neither."""
    first, second, third = (lora(name) for name in ("qv", "all_linear", "rslora"))
    prompts = [prompt_of(i) for i in range(size)]
    versions = [tokens_of(alone(engine, [Request(p, greedy(8), v) for p in prompts])) for v in (first, second, third)]
    plain = tokens_of(alone(engine, [Request(prompts[0], greedy(8))]))
    name = LoRARequest("swapped", 800)
    engine.add_lora(dataclasses.replace(name, lora_path=first.path))
    start(engine, [Request(p, greedy(8), name) for p in prompts], "old")
    start(engine, [Request(prompts[0], greedy(8))], "base")
    done = finish(engine, steps=2)
    for round_, version in enumerate((second, third)):
        engine.add_lora(dataclasses.replace(name, lora_path=version.path, load_inplace=True))
        start(engine, [Request(p, greedy(8), name) for p in prompts], f"new{round_} ")
        finish(engine, done, steps=2)
    engine.remove_lora("swapped")
    with pytest.raises(NotFoundError):
        engine.add_request("late", prompts[0], greedy(8), name)
    finish(engine, done)
    assert tokens_of([done["base0"]]) == plain
    for prefix, wanted in zip(("old", "new0 ", "new1 "), versions, strict=True):
        assert tokens_of(done[f"{prefix}{i}"] for i in range(size)) == wanted


@by_size
def test_d19_d20_texts_and_stops_are_those_alone(engine, size):
    """Nothing is sent that a stop string or a cut character takes back, whoever else is in the batch."""
    free = [
        Request(prompt_of(i), SamplingParams(max_tokens=16, seed=i, ignore_eos=True), lora("qv") if i % 2 else None)
        for i in range(size)
    ]
    requests, texts = [], []
    for request, output in zip(free, alone(engine, free), strict=True):
        text = output.outputs[0].text
        stops = [text[5:8], text[9:10]] if len(text) > 9 else []
        requests.append(request._replace(params=dataclasses.replace(request.params, stop=stops)))
        # Of those that are complete first.
        cut = min(((text.find(stop) + len(stop), text.find(stop)) for stop in stops), default=(0, len(text)))[1]
        texts.append(text[:cut])
    wanted = alone(engine, requests)
    assert [output.outputs[0].text for output in wanted] == texts
    ids, done = start(engine, requests), {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            final = wanted[ids.index(output.request_id)].outputs[0]
            assert final.text.startswith(output.outputs[0].text)
            done[output.request_id] = output
    for request_id, output in zip(ids, wanted, strict=True):
        for field in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert getattr(done[request_id].outputs[0], field) == getattr(output.outputs[0], field)
    assert "stop" in {output.outputs[0].finish_reason for output in wanted}


@by_size
def test_d21_edges_of_the_context(engine, size):
    lengths = cycle([CONTEXT - 1, CONTEXT - 3, CONTEXT - 16], size)
    requests = [Request([3 + i % 50 for i in range(length)], greedy(None)) for length in lengths]
    for bad in ([], [5] * CONTEXT):
        with pytest.raises(UserError):
            engine.add_request("bad", bad, greedy(1))
    outputs = run_all(engine, requests)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [CONTEXT - length for length in lengths]
    assert tokens_of(outputs) == tokens_of(alone(engine, requests))


@by_size
def test_seeds_edits_lookups_and_logprobs_are_those_alone(engine, size):
    """Everything that a row may ask for, in one batch: nobody gets another's."""
    kinds: list[dict[str, Any]] = [
        {"prompt_lookup_tokens": 9}, {"logprobs": 3, "top_k": 20}, {"prompt_lookup_tokens": 6, "temperature": 0.3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 0}, {"n": 3, "top_p": 0.9},
        {"structured_outputs": {"regex": "[a-f]{6}"}, "ignore_eos": False}, {"prompt_logprobs": 2, "min_p": 0.05},
        {"logit_bias": {65: 4.0}, "bad_words": ["e", "th"], "min_tokens": 4, "temperature": 0},
    ]  # fmt: skip
    users = cycle([None, lora("qv"), lora("dora"), [lora("qv", scale=0.5), lora("rank64")]], size)
    requests = [  # prompts with many of all tokens, so that lookups propose something
        Request(
            [(11 * i + 37 * k) % 250 + 3 for k in range(96)],
            SamplingParams(**{"max_tokens": 9, "seed": i, "ignore_eos": True, **kind}),
            user,
        )
        for i, (kind, user) in enumerate(zip(cycle(kinds, size), users, strict=True))
    ]
    plain = [r._replace(params=dataclasses.replace(r.params, prompt_lookup_tokens=0)) for r in requests]
    wanted, proposed = alone(engine, plain), engine.stats().proposed_tokens
    for output, other in zip(run_all(engine, requests), wanted, strict=True):
        assert (output.error, other.error) == (None, None)
        for mine, theirs in zip(output.outputs, other.outputs, strict=True):
            assert list(mine.token_ids) == list(theirs.token_ids)
        pairs = zip(tables(output), tables(other), strict=True)
        assert all(a.keys() == b.keys() and all(a[t] == pytest.approx(b[t], abs=1e-4) for t in a) for a, b in pairs)
    assert engine.stats().proposed_tokens > proposed


def tables(output: Any) -> list[dict[int, float]]:
    """The log-probabilities of a request, prompt and answers."""
    found = [*(output.prompt_logprobs or []), *(t for c in output.outputs for t in c.logprobs or [])]
    return [{token: value.logprob for token, value in table.items()} for table in found if table is not None]


@by_size
def test_d27_steps_that_all_fail_fail_all_of_them_and_the_next_is_served(monkeypatch, size):
    engine = tiny_engine(enable_lora=False)

    def broken(*_: Any) -> None:
        raise RuntimeError("no device")

    server = AsyncEngine(engine)

    async def one(number: int) -> Any:
        return await (await server.submit(prompt_of(number), greedy(4), f"r{number}")).final()

    async def everybody() -> list[Any]:
        return await asyncio.gather(*map(one, range(size)), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", broken)
        assert {type(error) for error in asyncio.run(everybody())} == {StepFailedError}
    assert len(asyncio.run(one(0)).outputs[0].token_ids) == 4
    server.shutdown(drain=False)


@by_size
def test_d28_figures_by_adapter_count_what_runs_and_what_waits(two_slots, size):
    names = cycle(["qv", "rank1", "attn_only"], size)
    start(two_slots, [Request(prompt_of(0), greedy(5), lora(name)) for name in names])
    while two_slots.has_unfinished_requests():
        stats, live = two_slots.stats(), Counter(s.seq.adapters[0].name for s in two_slots._requests.values())
        assert Counter(stats.running_by_adapter) + Counter(stats.waiting_by_adapter) == live
        assert stats.num_running + stats.num_waiting == live.total()
        assert len(stats.running_by_adapter) <= 2
        two_slots.step()
    assert two_slots.stats().running_by_adapter == two_slots.stats().waiting_by_adapter == {}
