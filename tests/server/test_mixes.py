"""The `lora` field: one adapter or a weighted mix over the base."""

from __future__ import annotations

import hashlib
import json

import pytest

from multilora_jax.server.mixes import MAX_ADAPTERS
from tests.server.harness import joined

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
MIX = [{"name": "adapter-a", "scale": 0.5}, {"name": "adapter-b"}]


def digests(server):
    return {adapter.name: adapter.digest for adapter in server.engine.list_loras()}


async def test_a_mix_is_served_over_the_base_and_says_of_what_it_is_made(server):
    for answer, text in (
        (await server.complete(lora=MIX, max_tokens=30), lambda c: c["text"]),
        (await server.chat(lora=MIX, max_tokens=30), lambda c: c["message"]["content"]),
    ):
        assert answer["model"] == "base"
        assert text(answer["choices"][0]).startswith("adapter-a*0.5+adapter-b*1:")
        digest = digests(server)
        assert answer["adapters"] == [
            {"name": "adapter-a", "scale": 0.5, "digest": digest["adapter-a"]},
            {"name": "adapter-b", "scale": 1.0, "digest": digest["adapter-b"]},
        ]
        parts = f"{digest['adapter-a']}*0.5+{digest['adapter-b']}*1.0"
        assert answer["system_fingerprint"] == f"mix-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": MESSAGES})])
async def test_every_chunk_of_a_stream_says_so_too(server, path, body):
    events = await server.events(path, {"model": "base", "lora": MIX, **body, "max_tokens": 30})
    assert len({json.dumps(event["adapters"]) for event in events}) == 1
    assert {event["system_fingerprint"][:4] for event in events} == {"mix-"}
    if path == COMPLETIONS:
        assert joined(events)[0]["text"].startswith("adapter-a*0.5+")


@pytest.mark.parametrize(
    "lora", [[{"name": "adapter-a"}], {"name": "adapter-a", "scale": 1}, {"name": "base:adapter-a", "scale": None}]
)
async def test_one_adapter_may_be_named_here_too(server, lora):
    answer = await server.complete(lora=lora, max_tokens=10)
    alone = await server.complete(model="adapter-a", max_tokens=10)
    assert answer["choices"] == alone["choices"]
    assert answer["system_fingerprint"] == alone["system_fingerprint"]
    assert (answer["model"], alone["model"]) == ("base", "adapter-a")
    assert [entry["name"] for entry in answer["adapters"]] == ["adapter-a"]
    assert "adapters" not in alone


@pytest.mark.parametrize("lora", [None, []])
async def test_none_means_none(server, lora):
    assert (await server.complete(lora=lora, max_tokens=5))["choices"][0]["text"] == "base:"
    answer = await server.complete(model="adapter-a", lora=lora, max_tokens=10)
    assert answer["choices"][0]["text"] == "adapter-a:"
    assert "adapters" not in answer


@pytest.mark.parametrize("scale", [-1000, 0, 0.25, 1000])
async def test_scales_may_be_any_number_of_reasonable_size(server, scale):
    answer = await server.complete(lora={"name": "adapter-a", "scale": scale}, max_tokens=30)
    assert answer["choices"][0]["text"].startswith(f"adapter-a*{scale:g}:")
    assert answer["adapters"][0]["scale"] == scale
    assert answer["system_fingerprint"].startswith("mix-")


@pytest.mark.parametrize(
    ("lora", "reason", "words"),
    [
        ("adapter-a", "bad_type", "must be a list"),
        (5, "bad_type", "must be a list"),
        (["adapter-a"], "bad_type", "lora[0] must be an object"),
        ([{}], "bad_value", "lora[0].name"),
        ({"scale": 1}, "bad_value", "lora.name"),
        ([{"name": ""}], "bad_value", "lora[0].name"),
        ([{"name": 5}], "bad_value", "lora[0].name"),
        ([{"name": "adapter-a", "weight": 1}], "unknown_parameter", "'weight'"),
        ([{"name": "adapter-a"}, {"name": "adapter-b", "scale": "1"}], "bad_lora_scale", "lora[1].scale"),
        ([{"name": "adapter-a", "scale": True}], "bad_lora_scale", "lora[0].scale"),
        ([{"name": "adapter-a", "scale": float("nan")}], "bad_lora_scale", "lora[0].scale"),
        ([{"name": "adapter-a", "scale": float("inf")}], "bad_lora_scale", "from -1000 to 1000"),
        ([{"name": "adapter-a", "scale": 10**400}], "bad_lora_scale", "lora[0].scale"),
        ([{"name": "adapter-a"}, {"name": "adapter-a", "scale": 2}], "duplicate_adapter", "more than once"),
        ([{"name": "adapter-a"}, {"name": "base:adapter-a"}], "duplicate_adapter", "more than once"),
        ([{"name": f"a{i}"} for i in range(MAX_ADAPTERS + 1)], "too_many_adapters", "at most 16"),
        ([{"name": "base"}], "name_is_base_model", "'base' is the base model"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bad_mixes_are_refused(server, path, lora, reason, words):
    body = {"model": "base", "lora": lora, **({"prompt": "hi"} if path == COMPLETIONS else {"messages": MESSAGES})}
    headers = {"Content-Type": "application/json"}
    response = await server.client.post(path, content=json.dumps(body), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["reason"], error["param"]) == (400, reason, "lora")
    assert words in error["message"]
    assert not server.engine.params_seen


async def test_d18_an_unknown_adapter_of_a_mix_is_404(server):
    for stream in (False, True):
        body = {"model": "base", "prompt": "hi", "lora": [MIX[0], {"name": "adapter-c"}], "stream": stream}
        response = await server.post(COMPLETIONS, body)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (404, "NotFoundError", "lora")
        assert "'adapter-c'" in error["message"]
        assert "Did you mean 'adapter-" in error["message"]
    assert not server.engine.params_seen


async def test_an_adapter_in_both_fields_is_ambiguous(server):
    for model in ("adapter-a", "base:adapter-b"):
        response = await server.post(COMPLETIONS, {"model": model, "prompt": "hi", "lora": MIX})
        error = response.json()["error"]
        assert (response.status_code, error["reason"], error["param"]) == (400, "ambiguous_lora", "lora")
        assert "'base'" in error["message"]
    response = await server.post(COMPLETIONS, {"model": "nobody", "prompt": "hi", "lora": MIX})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


async def test_the_most_adapters_in_one_mix(make_server, adapter_paths):
    path = adapter_paths["adapter-a"]
    server = make_server(lora_modules={f"a{i}": path for i in range(MAX_ADAPTERS)}, max_model_len=1000)
    answer = await server.complete(lora=[{"name": f"a{i}"} for i in range(MAX_ADAPTERS)], max_tokens=200)
    assert "a0*1+a1*1+" in answer["choices"][0]["text"]
    assert len(answer["adapters"]) == MAX_ADAPTERS
