"""/v1/models, /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from pathlib import Path

import pytest

from multilora_jax.request import LoRARequest
from tests.server.fake_engine import GOLDEN
from tests.server.harness import parse_events, wait_for

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = [str(GOLDEN / "cases" / case) for case in ("all_linear", "attn_only")]


async def names(server):
    response = await server.client.get("/v1/models")
    assert response.status_code == 200
    return [card["id"] for card in response.json()["data"]]


async def test_models_lists_the_base_and_then_the_adapters(server, adapter_paths):
    listing = (await server.client.get("/v1/models")).json()
    assert listing["object"] == "list"
    base, first, _ = listing["data"]
    assert {**base, "created": 0} == {
        "id": "base", "object": "model", "created": 0, "owned_by": "multilora_jax", "root": "fake", "parent": None,
        "max_model_len": 128,
    }  # fmt: skip
    assert first["id"] == "adapter-a"
    assert first["root"] == adapter_paths["adapter-a"]
    assert first["parent"] == "base"
    assert (first["rank"], first["digest"], first["state"], first["pinned"]) == (None, None, "registered", False)
    response = await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[0]})
    card = (await server.client.get("/v1/models")).json()["data"][-1]
    assert response.json() == card
    assert (card["id"], card["rank"], len(card["digest"]), card["state"]) == ("new", 8, 64, "host")


async def test_models_tells_a_resident_adapter(make_server):
    server = make_server(step_seconds=0.002, max_model_len=10_000)
    call = asyncio.create_task(server.complete(model="adapter-b", max_tokens=300))
    await wait_for(lambda: bool(server.engine.requests))
    cards = (await server.client.get("/v1/models")).json()["data"]
    assert {card["id"]: card.get("state") for card in cards} == {
        "base": None, "adapter-a": "registered", "adapter-b": "resident",
    }  # fmt: skip
    await call


async def test_one_model_s_card(make_server, adapter_paths):
    server = make_server(lora_modules={**adapter_paths, "org/adapter": PATHS[0]})
    cards = (await server.client.get("/v1/models")).json()["data"]
    for card in cards:
        response = await server.client.get(f"/v1/models/{card['id']}")
        assert (response.status_code, response.json()) == (200, card)
    response = await server.client.get("/v1/models/adaptr-a")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")
    assert "Did you mean 'adapter-a'?" in response.json()["error"]["message"]


async def test_loads_and_unloads_are_logged(server, caplog):
    caplog.set_level(logging.INFO, "multilora_jax")
    await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[0]})
    await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[1], "load_inplace": True})
    await server.post(LOAD, {"lora_name": "bad", "lora_path": "/nowhere\nat all"})
    await server.post(UNLOAD, {"lora_name": "new"})
    lines = [r.getMessage() for r in caplog.records if r.name == "multilora_jax.server.adapters"]
    assert len(lines) == 4
    assert "\n" not in "".join(lines)
    for line, start in zip(
        lines,
        (
            "adapter 'new' loaded: rank 8", "adapter 'new' replaced: rank", "adapter 'bad' refused (adapter_path_not",
            "adapter 'new' unloaded, 0 requests",
        ),
        strict=True,
    ):  # fmt: skip
        assert line.startswith(start)


async def test_an_adapter_s_warnings_are_on_its_card_and_in_the_log_once(make_server, tmp_path, caplog):
    config = json.loads((Path(PATHS[0]) / "adapter_config.json").read_text())
    shutil.copytree(PATHS[0], tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["nothing"]}))
    server = make_server(lora_modules={"cold": str(tmp_path / "a"), "good": PATHS[0]})
    cards = (await server.client.get("/v1/models")).json()["data"][1:]
    assert [card["warnings"] for card in cards] == [[], []]
    for name in ("cold", "good", "cold"):
        await server.post("/v1/completions", {"model": name, "prompt": "hi", "max_tokens": 1})
    loaded = (await server.post(LOAD, {"lora_name": "loaded", "lora_path": str(tmp_path / "a")})).json()
    cards = (await server.client.get("/v1/models")).json()["data"][1:]
    assert [len(card["warnings"]) for card in cards] == [1, 0, 1]
    assert "PEFT would ignore" in loaded["warnings"][0]
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert lines == [f"adapter '{name}': {loaded['warnings'][0]}" for name in ("cold", "loaded")]


async def test_the_path_of_a_file_asks_for_its_folder(server):
    path = f"{PATHS[0]}/adapter_model.safetensors"
    response = await server.post(LOAD, {"lora_name": "new", "lora_path": path})
    assert response.status_code == 404
    assert f"'{path}' is a file: give its folder" in response.json()["error"]["message"]


async def test_load_use_unload(make_server):
    server = make_server(lora_modules={})
    response = await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[0]})
    assert response.status_code == 200
    assert (response.json()["id"], response.json()["root"]) == ("new", PATHS[0])
    assert await names(server) == ["base", "new"]
    assert (await server.complete(model="new", max_tokens=4))["choices"][0]["text"] == "new:"
    response = await server.post(UNLOAD, {"lora_name": "new"})
    assert (response.status_code, response.json()["deleted"]) == (200, True)
    assert await names(server) == ["base"]
    response = await server.post("/v1/completions", {"model": "new", "prompt": "hi"})
    assert response.status_code == 404
    assert (await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[1]})).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "adapter-a", "lora_path": PATHS[0]}, 400, "lora_name"),
        ({"lora_name": "base", "lora_path": PATHS[0]}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": PATHS[0]}, 400, "lora_name"),
        ({"lora_name": "new", "lora_path": ""}, 400, "lora_path"),
        ({"lora_path": PATHS[0]}, 400, "lora_name"),
        ({"lora_name": "new"}, 400, "lora_path"),
        ({"lora_name": 5, "lora_path": PATHS[0]}, 400, "lora_name"),
        ({"lora_name": "new", "lora_path": PATHS[0], "pinned": 1}, 400, "pinned"),
        ({"lora_name": "new", "lora_path": PATHS[0], "load_in_place": True}, 400, "load_in_place"),
        ({"lora_name": "new", "lora_path": str(GOLDEN / "nowhere")}, 404, "lora_path"),
        ({"lora_name": "new", "lora_path": str(GOLDEN / "cases" / "rank_pattern" / "adapter_config.json")}, None, None),
    ],
)
async def test_bad_loads_change_nothing(server, body, status, param):
    before = await names(server)
    response = await server.post(LOAD, body)
    assert response.status_code == status if status else response.status_code in (400, 404)
    if param:
        assert response.json()["error"]["param"] == param
    assert await names(server) == before


async def test_a_bad_adapter_is_refused_with_its_reason(make_server, tmp_path):
    server = make_server(max_lora_rank=8)
    folder = tmp_path / "cut"
    shutil.copytree(PATHS[0], folder)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    response = await server.post(LOAD, {"lora_name": "new", "lora_path": str(folder)})
    assert response.status_code == 400
    assert response.json()["error"]["reason"] != "bad_request"
    assert await names(server) == ["base", "adapter-a", "adapter-b"]


async def test_paths_outside_the_allowed_roots_are_403(make_server):
    server = make_server(adapter_roots=(PATHS[0],))
    response = await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[1]})
    assert (response.status_code, response.json()["error"]["type"]) == (403, "PermissionDeniedError")
    assert (await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[0]})).status_code == 200


async def test_load_inplace_replaces_the_content(server):
    old = (await server.complete(model="adapter-a"))["system_fingerprint"]
    int_ids = [adapter.int_id for adapter in server.engine.list_loras()]
    body = {"lora_name": "adapter-a", "lora_path": PATHS[1], "load_inplace": True}
    assert (await server.post(LOAD, body)).status_code == 200
    assert await names(server) == ["base", "adapter-a", "adapter-b"]
    assert (await server.complete(model="adapter-a"))["system_fingerprint"] != old
    assert [adapter.int_id for adapter in server.engine.list_loras()] == int_ids


async def test_bad_unloads(server):
    response = await server.post(UNLOAD, {"lora_name": "nobody"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "lora_name")
    response = await server.post(UNLOAD, {"lora_name": "base"})
    assert (response.status_code, response.json()["error"]["reason"]) == (400, "name_is_base_model")
    assert "'base' is the base model and cannot be unloaded" in response.json()["error"]["message"]
    assert (await server.post(UNLOAD, {"lora_name": ""})).status_code == 400
    assert (await server.post(UNLOAD, {})).status_code == 400
    assert await names(server) == ["base", "adapter-a", "adapter-b"]


async def test_d22_parallel_loads_of_one_name_leave_one(server):
    bodies = [{"lora_name": "new", "lora_path": PATHS[i % 2]} for i in range(20)]
    statuses = [r.status_code for r in await asyncio.gather(*(server.post(LOAD, body) for body in bodies))]
    assert sorted(statuses) == [200] + [400] * 19
    assert (await names(server)).count("new") == 1


async def test_d22_parallel_loads_of_different_names_all_succeed(server):
    bodies = [{"lora_name": f"n{i}", "lora_path": PATHS[i % 2]} for i in range(20)]
    statuses = [r.status_code for r in await asyncio.gather(*(server.post(LOAD, body) for body in bodies))]
    assert statuses == [200] * 20
    assert len({adapter.int_id for adapter in server.engine.list_loras()}) == 22


async def test_d22_loads_and_unloads_in_parallel(server):
    calls = []
    for _ in range(25):
        calls.append(server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[0]}))
        calls.append(server.post(UNLOAD, {"lora_name": "new"}))
    responses = await asyncio.gather(*calls)
    loaded = [r.status_code for r in responses[::2]].count(200)
    unloaded = [r.status_code for r in responses[1::2]].count(200)
    assert {r.status_code for r in responses} <= {200, 400, 404}
    assert loaded - unloaded == (await names(server)).count("new")
    assert loaded >= 1


async def test_d23_an_unload_touches_that_adapter_only(make_server):
    server = make_server(step_seconds=0.004, max_model_len=10_000)
    body = {"prompt": "hi", "max_tokens": 100, "stream": True}
    models = ("base", "adapter-a", "adapter-b")
    streams = [asyncio.create_task(server.post("/v1/completions", {**body, "model": m})) for m in models]
    await wait_for(lambda: len(server.engine.requests) == 3)
    unload = asyncio.create_task(server.post(UNLOAD, {"lora_name": "adapter-b"}))
    await wait_for(lambda: len(server.engine.list_loras()) == 1)
    assert not unload.done()  # it answers when the running stream has ended
    assert (await server.post("/v1/completions", {**body, "model": "adapter-b"})).status_code == 404
    for model in ("base", "adapter-a"):
        assert (await server.complete(model=model, max_tokens=2))["model"] == model
        assert (await server.chat(model=model, max_tokens=2))["model"] == model
    for model, stream in zip(models, streams, strict=True):
        events = parse_events(await stream)
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text.startswith(f"{model}:abc")
        assert len(text) == 100
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert (await unload).json()["requests_draining"] == 0


async def test_d23_a_request_does_not_bring_back_an_adapter_that_is_being_unloaded(server, monkeypatch):
    lora_request = server.engine.lora_request

    def unloaded_meanwhile(name):
        request = lora_request(name)
        server.engine.remove_lora(name)
        return request

    monkeypatch.setattr(server.engine, "lora_request", unloaded_meanwhile)
    response = await server.post("/v1/completions", {"model": "adapter-a", "prompt": "hi"})
    assert response.status_code == 404
    assert await names(server) == ["base", "adapter-b"]


async def test_a_request_finds_an_adapter_that_was_unloaded_and_loaded_again(server, monkeypatch):
    """Its name alone counts: the id that it had when the request came in may be another's by now."""
    lora_request = server.engine.lora_request

    def reloaded_meanwhile(name):
        request = lora_request(name)
        server.engine.remove_lora(name)
        server.engine.add_lora(LoRARequest(name, 77, PATHS[1]))
        return request

    monkeypatch.setattr(server.engine, "lora_request", reloaded_meanwhile)
    answer = await server.complete(model="adapter-a", max_tokens=10)
    assert answer["choices"][0]["text"] == "adapter-a:"
    digest = {adapter.name: adapter.digest for adapter in server.engine.list_loras()}["adapter-a"]
    assert answer["system_fingerprint"] == f"lora-{digest[:16]}"


async def test_an_unload_does_not_wait_for_ever(make_server, monkeypatch):
    monkeypatch.setattr("multilora_jax.server.adapters.UNLOAD_WAIT_S", 0.05)
    server = make_server(step_seconds=0.002, max_model_len=10_000)
    call = asyncio.create_task(server.complete(model="adapter-b", max_tokens=400))
    await wait_for(lambda: bool(server.engine.requests))
    response = await server.post(UNLOAD, {"lora_name": "adapter-b"})
    assert (response.status_code, response.json()["requests_draining"]) == (200, 1)
    assert (await call)["usage"]["completion_tokens"] == 400
