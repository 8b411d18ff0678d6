"""Adapters that were never read when a request names them, and adapters that bring their own tokens and template."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading

import pytest

from multilora_jax.errors import AdapterError
from tests.server.fake_engine import GOLDEN, VOCAB_SIZE, byte_tokenizer
from tests.server.harness import parse_events, wait_for

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATH = GOLDEN / "cases" / "all_linear"
BODY = {"model": "adapter-a", "prompt": "hi"}


@pytest.fixture
def own_voice(tmp_path):
    """An adapter folder with a tokenizer that knows one more token, <end>, and a template of its own."""
    folder = tmp_path / "own"
    shutil.copytree(PATH, folder)
    tokenizer = byte_tokenizer()._backend
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text("own[{{ messages[0].content }}]<end>")
    return str(folder)


async def test_a_cold_load_holds_up_its_own_requests_only(server):
    gate = server.engine.builder.gates[str(PATH)] = threading.Event()
    cold = [asyncio.create_task(server.complete(model="adapter-a", max_tokens=12)) for _ in range(3)]
    await wait_for(lambda: bool(server.engine.builder.reads))
    for model in ("base", "adapter-b"):
        answer = await asyncio.wait_for(server.complete(model=model, max_tokens=12), 5)
        assert answer["choices"][0]["text"].startswith(f"{model}:")
    card = (await server.client.get("/v1/models/adapter-a")).json()
    assert (card["state"], card["digest"], card["rank"]) == ("registered", None, None)
    gate.set()
    assert {answer["choices"][0]["text"] for answer in await asyncio.gather(*cold)} == {"adapter-a:ab"}
    card = (await server.client.get("/v1/models/adapter-a")).json()
    assert (card["state"], len(card["digest"]), card["rank"]) == ("resident", 64, 8)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_adapter_that_turns_out_bad_is_refused_before_any_answer(make_server, tmp_path, stream):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{")
    server = make_server(lora_modules={"bad": str(tmp_path)})
    for fields in ({"model": "bad"}, {"model": "base", "lora": [{"name": "bad"}]}):
        response = await server.post(COMPLETIONS, {"prompt": "hi", **fields, "stream": stream})
        assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
        assert response.json()["error"]["reason"] != "bad_request"
    assert (await server.complete(max_tokens=5))["choices"][0]["text"] == "base:"


async def test_an_adapter_whose_files_changed_while_its_request_waited_is_an_error(server):
    await server.complete(model="adapter-a")
    server.engine.give_up["adapter-a"] = AdapterError("the files are others now", reason="adapter_changed")
    response = await server.post(COMPLETIONS, BODY)
    assert (response.status_code, response.json()["error"]["reason"]) == (400, "adapter_changed")
    messages = [{"role": "user", "content": "hi"}]
    response = await server.post(CHAT, {"model": "adapter-a", "messages": messages})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the files are others now")
    for path, body in ((COMPLETIONS, BODY), (CHAT, {"model": "adapter-a", "messages": messages})):
        answer = await server.post(path, {**body, "stream": True})  # nothing was sent yet: it has a status of its own
        assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "adapter_changed")
    assert (await server.complete(max_tokens=5))["choices"][0]["text"] == "base:"


async def test_a_stream_of_several_prompts_ends_with_the_error_of_one(make_server):
    server = make_server(step_seconds=0.003, max_model_len=10_000)
    body = {**BODY, "prompt": ["hi", "ho"], "max_tokens": 5000, "stream": True}
    call = asyncio.create_task(server.post(COMPLETIONS, body))
    await wait_for(lambda: server.engine.counts.steps > 3)
    server.engine.give_up["adapter-a"] = AdapterError("gone", reason="adapter_changed")
    events = parse_events(await asyncio.wait_for(call, 5))
    assert events[0]["choices"][0]["text"]
    assert events[-1]["error"]["reason"] == "adapter_changed"
    await wait_for(lambda: not server.engine.requests)


# ---- an adapter's own tokenizer and template


async def test_an_adapter_s_own_tokenizer_reads_and_writes_its_texts_only(make_server, own_voice, adapter_paths):
    server = make_server(lora_modules={**adapter_paths, "own": own_voice})
    fields = {"prompt": "hi<end>", "max_tokens": 1, "return_token_ids": True}
    ids = {}
    for model in ("own", "base", "adapter-a"):
        ids[model] = (await server.complete(model=model, **fields))["choices"][0]["prompt_token_ids"]
    assert ids["own"][-3:] == [*b"hi", VOCAB_SIZE]
    assert ids["base"] == ids["adapter-a"]
    assert bytes(ids["base"][1:]) == b"hi<end>"
    answer = await server.complete(model="own", prompt="hi<end>", max_tokens=0, echo=True, logprobs=0)
    assert answer["choices"][0]["logprobs"]["tokens"][-1] == "<end>"


async def test_token_ids_that_an_adapter_adds_are_for_its_requests_only(make_server, own_voice):
    server = make_server(lora_modules={"own": own_voice, "plain": str(PATH)})
    body = {"prompt": [104, VOCAB_SIZE], "max_tokens": 1}
    assert (await server.complete(model="own", **body))["usage"]["prompt_tokens"] == 2
    assert (await server.complete(lora=[{"name": "plain"}, {"name": "own"}], **body))["model"] == "base"
    for model in ("base", "plain"):
        response = await server.post(COMPLETIONS, {"model": model, **body})
        assert (response.status_code, response.json()["error"]["reason"]) == (400, "bad_token_id")
        assert f"[0, {VOCAB_SIZE})" in response.json()["error"]["message"]
    response = await server.post(COMPLETIONS, {"model": "own", "prompt": [VOCAB_SIZE + 1]})
    assert response.status_code == 400


@pytest.mark.parametrize("configured", [None, "config[{{ messages[0].content }}]"])
async def test_the_adapter_s_template_wins_over_the_configured_one(make_server, own_voice, configured):
    config = {} if configured is None else {"chat_template": configured}
    server = make_server(lora_modules={"own": own_voice, "plain": str(PATH)}, **config)
    other = b"config[hi]" if configured else b"<user>hi\n<assistant>"
    for model, expected in (("own", b"own[hi]"), ("plain", other), ("base", other)):
        answer = await server.chat(model=model, max_tokens=1, return_token_ids=True)
        ids = answer["prompt_token_ids"]
        assert bytes(i for i in ids if i < 256) == expected
        assert (VOCAB_SIZE in ids) == (model == "own")
