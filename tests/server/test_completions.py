"""/v1/completions: shapes, echo, log probabilities, several prompts, token ids."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from tests.server.fake_engine import BOS, EOS
from tests.server.harness import joined, wait_for

pytestmark = pytest.mark.anyio

HALF = -math.log(2)


async def test_the_shape_of_an_answer(server):
    answer = await server.complete(max_tokens=6)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "base")
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {"index": 0, "text": "base:a", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


async def test_sixteen_tokens_by_default_and_for_null(server):
    assert (await server.complete())["usage"]["completion_tokens"] == 16
    assert (await server.complete(max_tokens=None))["usage"]["completion_tokens"] == 16


async def test_sampling_fields_reach_the_engine(server):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["x", "y"],
        "stop_token_ids": [5], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "max_tokens": 3,
    }  # fmt: skip
    await server.complete(**fields)
    params = server.engine.params_seen[-1]
    assert {name: getattr(params, name) for name in fields} == fields


async def test_defaults_and_nulls_are_openai_s(server):
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "seed", "stop", "logprobs", "stream", "user", "n"))
    await server.complete(**nulls)
    params = server.engine.params_seen[-1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.seed, params.stop, params.logprobs) == (None, [], None)


async def test_stop_strings_and_tokens_are_reported(server):
    choice = (await server.complete(stop="c"))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("base:ab", "stop", "c")
    choice = (await server.complete(stop_token_ids=[ord("b")]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", ord("b"))
    server.engine.script["hi"] = b"done"
    choice = (await server.complete())["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("done", "stop", None)


async def test_several_prompts_become_several_choices_in_order(server):
    server.engine.script = {"one": b"first", "two": b"second, longer", "three": b""}
    answer = await server.complete(prompt=["one", "two", "three"])
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "first"), (1, "second, longer"), (2, "")]
    assert answer["usage"]["prompt_tokens"] == 4 + 4 + 6
    assert answer["usage"]["completion_tokens"] == 6 + 15 + 1


async def test_choices_are_in_order_when_the_engine_s_outputs_are_not(make_server):
    server = make_server(max_num_seqs=1)
    server.engine.newest_first = True
    server.engine.script = {"one": b"1", "two": b"2", "three": b"3"}
    server.engine.gate.clear()
    call = asyncio.create_task(server.complete(prompt=["one", "two", "three"]))
    await wait_for(lambda: server.async_engine.num_live_requests == 3)
    server.engine.gate.set()
    assert [choice["text"] for choice in (await call)["choices"]] == ["1", "2", "3"]


async def test_prompts_of_token_ids_are_taken_as_they_are(server):
    server.engine.script = {"hi": b"X", "ho": b"Y"}
    one = await server.complete(prompt=[104, 105], return_token_ids=True)
    assert one["choices"][0]["text"] == "X"
    assert one["choices"][0]["prompt_token_ids"] == [104, 105]
    assert one["choices"][0]["token_ids"] == [ord("X"), EOS]
    two = await server.complete(prompt=[[104, 105], [104, 111]])
    assert [c["text"] for c in two["choices"]] == ["X", "Y"]


async def test_d10_a_raw_prompt_gets_one_bos(server):
    for prompt in ("hi", "<s>hi"):
        choice = (await server.complete(prompt=prompt, return_token_ids=True))["choices"][0]
        assert choice["prompt_token_ids"] == [BOS, 104, 105]


async def test_echo_gives_the_prompt_back(server):
    assert (await server.complete(echo=True, max_tokens=4))["choices"][0]["text"] == "hibase"
    ids = await server.complete(prompt=[[104, 105]], echo=True, max_tokens=4)
    assert ids["choices"][0]["text"] == "hibase"


async def test_logprobs_are_real_and_finite(server):
    got = (await server.complete(logprobs=3, max_tokens=2))["choices"][0]["logprobs"]
    assert got == {
        "tokens": ["b", "a"],
        "token_logprobs": [HALF, HALF],
        "top_logprobs": [{"b": HALF, "c": 2 * HALF, "d": -9999.0}, {"a": HALF, "b": 2 * HALF, "c": -9999.0}],
        "text_offset": [0, 1],
    }
    got = (await server.complete(logprobs=0, max_tokens=1))["choices"][0]["logprobs"]
    assert got["top_logprobs"] == [{"b": HALF}]


async def test_echo_with_logprobs_covers_the_prompt_and_places_tokens_in_the_text(server):
    choice = (await server.complete(echo=True, logprobs=1, max_tokens=2))["choices"][0]
    got = choice["logprobs"]
    assert got["tokens"] == ["<s>", "h", "i", "b", "a"]
    assert got["token_logprobs"] == [None, HALF, HALF, HALF, HALF]
    assert got["top_logprobs"][:2] == [None, {"h": HALF}]
    places = zip(got["tokens"][1:], got["text_offset"][1:], strict=True)
    assert all(choice["text"][place:].startswith(token) for token, place in places)


async def test_logprobs_of_parts_of_characters_are_told_apart(server):
    server.engine.script["hi"] = "é😀!".encode()
    choice = (await server.complete(logprobs=2))["choices"][0]
    got = choice["logprobs"]
    assert got["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]
    assert got["top_logprobs"][0] == {"bytes:\\xc3": HALF, "bytes:\\xc4": -9999.0}
    assert got["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    assert choice["text"][2] == "!"


async def test_prompt_logprobs_have_vllm_s_shape(server):
    choice = (await server.complete(prompt_logprobs=2, max_tokens=1))["choices"][0]
    entry = {"logprob": HALF, "rank": 1, "decoded_token": "h"}
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["104"] == entry
    assert choice["prompt_logprobs"][1]["105"]["logprob"] == -9999.0
    assert len(choice["prompt_logprobs"]) == 3


async def test_request_id_names_the_answer_and_may_come_again(server):
    assert (await server.complete(request_id="mine"))["id"] == "cmpl-mine"
    assert (await server.complete(request_id="mine"))["id"] == "cmpl-mine"


async def test_truncation_keeps_the_end_of_the_prompt(server):
    choice = (await server.complete(prompt="abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=1))["choices"][0]
    assert choice["text"] == "efb"
    answer = await server.complete(prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=28)
    assert answer["usage"]["prompt_tokens"] == 100


async def test_system_fingerprint_tells_an_adapter_s_content(server):
    assert (await server.complete())["system_fingerprint"] is None
    answer = await server.complete(model="adapter-a")
    assert answer["system_fingerprint"] == f"lora-{server.engine.registry.get('adapter-a').digest[:16]}"


async def test_one_refused_prompt_aborts_its_siblings(server):
    response = await server.post(
        "/v1/completions", {"model": "base", "prompt": ["x", "BUG", "y"], "max_tokens": 100, "temperature": 0}
    )
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "a bug" not in response.text
    await server.async_engine.stats()  # read after the aborts have been done
    assert server.async_engine.num_live_requests == 0
    assert not server.engine.requests


@pytest.mark.parametrize("prompts", ["hi", ["hi", "ho", "hu"]])
@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 1}])
async def test_a_stream_says_what_the_whole_answer_says(server, prompts, extra):
    server.engine.script = {"hi": "e\u0301 😀 fin".encode(), "ho": b"stop now", "hu": b""}
    body = {"model": "base", "prompt": prompts, "max_tokens": 30, "stop": ["now"], "return_token_ids": True, **extra}
    whole = await server.complete(**body)
    events = await server.events("/v1/completions", {**body, "request_id": "r"})
    assert {event["id"] for event in events} == {"cmpl-r"}
    assert {event["object"] for event in events} == {"text_completion"}
    assert joined(events) == whole["choices"]


async def test_stream_usage(server):
    body = {"model": "base", "prompt": "hi", "max_tokens": 5}
    plain = await server.events("/v1/completions", body)
    assert all("usage" not in event for event in plain)
    events = await server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == (await server.complete(max_tokens=5))["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.events("/v1/completions", {**body, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 5


async def test_json_carries_unicode_as_it_is(server):
    server.engine.script["hi"] = "naïve 😀".encode()
    response = await server.post("/v1/completions", {"model": "base", "prompt": "hi"})
    assert "naïve 😀" in response.text
    assert json.loads(response.text)["choices"][0]["text"] == "naïve 😀"
