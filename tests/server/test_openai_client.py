"""The `openai` package as the client, over a real socket."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.server.fake_engine import EOS
from tests.server.harness import listening

MESSAGES: list = [{"role": "user", "content": "hi"}]


@pytest.fixture
def base_url(make_server):
    server = make_server(api_keys=("sk-api",), step_seconds=0.001)
    server.engine.script = {"hi": b"plain answer", "<user>hi\n<assistant>": "chat answer 😀".encode()}
    with listening(server.app) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="sk-api", max_retries=0) as client:
        yield client


def reason(error: openai.APIStatusError) -> str:
    return error.response.json()["error"]["reason"]


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["base", "adapter-a", "adapter-b"]
    assert models[1].owned_by == "multilora_jax"
    assert client.models.retrieve("adapter-a") == models[1]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("adapter-x")


def test_chat(client):
    answer = client.chat.completions.create(model="base", messages=MESSAGES, logprobs=True, top_logprobs=1)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "chat answer 😀")
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len("chat answer 😀".encode()) + 1
    assert choice.logprobs.content[0].token == choice.logprobs.content[0].top_logprobs[0].token == "c"


def test_chat_stream(client):
    options = {"include_usage": True}
    stream = client.chat.completions.create(model="adapter-a", messages=MESSAGES, stream=True, stream_options=options)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "chat answer 😀"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens) == ([], 21)
    assert {chunk.model for chunk in chunks} == {"adapter-a"}


def test_completions(client):
    answer = client.completions.create(model="base", prompt=["hi", "hi"], logprobs=1, echo=True, max_tokens=20)
    assert [choice.text for choice in answer.choices] == ["hiplain answer"] * 2
    assert len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.text_offset) == 3 + 13
    pieces = client.completions.create(model="base", prompt="hi", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "plain answer"


def test_extra_fields(client):
    extra = {"return_token_ids": True, "top_k": 5, "stop_token_ids": [ord("n")]}
    answer = client.completions.create(model="base", prompt=[104, 105], extra_body=extra)
    assert answer.choices[0].text == "plai"
    assert answer.choices[0].token_ids == [*b"plain"]
    assert EOS not in answer.choices[0].token_ids


def test_mixes(client):
    lora = [{"name": "adapter-a", "scale": 0.5}, {"name": "adapter-b", "scale": 0.5}]
    answer = client.completions.create(model="base", prompt="ho", max_tokens=40, extra_body={"lora": lora})
    assert answer.choices[0].text.startswith("adapter-a*0.5+adapter-b*0.5:")
    assert (answer.model, [entry["name"] for entry in answer.adapters]) == ("base", ["adapter-a", "adapter-b"])
    assert answer.system_fingerprint.startswith("mix-")
    chat = client.chat.completions.create(model="base", messages=MESSAGES, extra_body={"lora": lora[:1]})
    assert chat.choices[0].message.content == "chat answer 😀"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="adapter-a", prompt="ho", extra_body={"lora": lora})
    assert reason(caught.value) == "ambiguous_lora"


def test_errors_map_to_the_client_s_classes(client, base_url):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="adaptr-a", messages=MESSAGES, stream=True)
    assert caught.value.param == "model"
    assert reason(caught.value) == "unknown_adapter"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="base", prompt="x" * 500)
    assert reason(caught.value) == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=base_url, api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_async_client_many_at_once(base_url):
    async def run():
        async with openai.AsyncOpenAI(base_url=base_url, api_key="sk-api", max_retries=0) as client:

            async def one(i):
                if i % 2:
                    answer = await client.completions.create(model="base", prompt="hi")
                    return answer.choices[0].text
                stream = await client.chat.completions.create(model="base", messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(20)))

    assert asyncio.run(run()) == ["chat answer 😀", "plain answer"] * 10


def test_an_engine_that_dies_raises_in_the_client(make_server):
    server = make_server(step_seconds=0.01)
    with (
        listening(server.app) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = iter(client.chat.completions.create(model="base", messages=MESSAGES, stream=True))
        next(stream)
        server.engine.fail_step = RuntimeError("device lost")
        with pytest.raises(openai.APIError, match="internal error"):
            list(stream)
