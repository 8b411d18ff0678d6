"""/tokenize and /detokenize: texts, conversations, adapters with tokenizers of their own."""

from __future__ import annotations

import pytest

from tests.server.fake_engine import BOS

pytestmark = pytest.mark.anyio


async def tokenize(server, **body):
    response = await server.post("/tokenize", body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text(server):
    assert await tokenize(server, prompt="hi") == {
        "count": 3, "max_model_len": 128, "tokens": [BOS, 104, 105], "token_strs": None,
    }  # fmt: skip
    answer = await tokenize(server, model="adapter-a", prompt="é", add_special_tokens=False, return_token_strs=True)
    assert (answer["tokens"], answer["token_strs"]) == ([0xC3, 0xA9], ["Ã", "©"])
    assert (await tokenize(server, prompt="", add_special_tokens=False))["tokens"] == []


async def test_a_conversation_is_read_as_a_request_reads_it(server):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        asked = await server.chat(messages=messages, max_tokens=1, return_token_ids=True, **fields)
        assert (await tokenize(server, messages=messages, **fields))["tokens"] == asked["prompt_token_ids"]


async def test_ids_back_to_text(server):
    ids = (await tokenize(server, prompt="hé 😀"))["tokens"]
    response = await server.post("/detokenize", {"tokens": ids, "model": "base"})
    assert response.json() == {"prompt": "<s>hé 😀"}
    response = await server.post("/detokenize", {"tokens": ids, "skip_special_tokens": True})
    assert response.json() == {"prompt": "hé 😀"}
    assert (await server.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages", 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt", 400),
        ("/tokenize", {"prompt": 5}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", 400),
        ("/tokenize", {"prompt": "a", "model": "adaptr-a"}, "model", 404),
        ("/tokenize", {"prompt": "a", "text": "b"}, "text", 400),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": [258]}, "tokens", 400),
        ("/detokenize", {"tokens": [-1]}, "tokens", 400),
        ("/detokenize", {"tokens": ["a"]}, "tokens", 400),
        ("/detokenize", {"tokens": [1], "model": ""}, "model", 400),
    ],
)
async def test_bad_bodies_name_the_field(server, path, body, param, status):
    response = await server.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_an_adapter_s_own_tokenizer_and_template(make_server, tmp_path, adapter_paths):
    import shutil

    folder = tmp_path / "own"
    shutil.copytree(adapter_paths["adapter-a"], folder)
    from tests.server.fake_engine import byte_tokenizer

    backend = byte_tokenizer()._backend
    backend.add_tokens(["hello"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    server = make_server(lora_modules={"own": str(folder)})
    assert (await tokenize(server, prompt="hello"))["tokens"] == [BOS, *b"hello"]
    assert (await tokenize(server, model="own", prompt="hello"))["tokens"] == [258]
    messages = [{"role": "user", "content": "hello"}]
    assert (await tokenize(server, model="own", messages=messages))["tokens"] == [258, ord("?")]
    assert (await server.post("/detokenize", {"model": "own", "tokens": [258]})).json() == {"prompt": "hello"}
    assert (await server.post("/detokenize", {"tokens": [258]})).status_code == 400
