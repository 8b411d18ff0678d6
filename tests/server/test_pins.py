"""Pinned adapters, and SGLang's names for the routes."""

from __future__ import annotations

import pytest

from tests.server.fake_engine import GOLDEN

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PIN, UNPIN = "/v1/pin_lora_adapter", "/v1/unpin_lora_adapter"
PATHS = [str(GOLDEN / "cases" / case) for case in ("all_linear", "attn_only")]


async def cards(server):
    return {card["id"]: card for card in (await server.client.get("/v1/models")).json()["data"]}


async def test_a_pinned_load_is_resident_until_it_is_unloaded(server):
    response = await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[0], "pinned": True})
    assert response.status_code == 200
    assert (response.json()["state"], response.json()["pinned"]) == ("resident", True)
    assert (await cards(server))["new"] == response.json()
    assert (await server.post(UNLOAD, {"lora_name": "new"})).status_code == 200
    assert not server.engine.pinned


async def test_a_pinned_load_without_room_is_not_left_half_done(server):
    server.engine.max_pinned = 0
    before = await cards(server)
    response = await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[0], "pinned": True})
    assert (response.status_code, response.json()["error"]["reason"]) == (400, "pin_limit")
    assert await cards(server) == before
    assert (await server.post(LOAD, {"lora_name": "new", "lora_path": PATHS[0]})).status_code == 200


async def test_pin_and_unpin(server):
    for path, pinned in ((PIN, True), (PIN, True), (UNPIN, False), (UNPIN, False)):
        response = await server.post(path, {"lora_name": "adapter-a"})
        assert (response.status_code, response.json()["pinned"]) == (200, pinned)
        assert response.json() == (await cards(server))["adapter-a"]
    assert (await cards(server))["adapter-b"]["pinned"] is False


@pytest.mark.parametrize("path", [PIN, UNPIN])
async def test_bad_pins(server, path):
    for body, status, reason in (
        ({"lora_name": "adaptr-a"}, 404, "unknown_adapter"),
        ({"lora_name": "base"}, 400, "name_is_base_model"),
        ({"lora_name": " "}, 400, "empty_lora_name"),
        ({}, 400, "missing_field"),
        ({"lora_name": "adapter-a", "pinned": True}, 400, "unknown_parameter"),
    ):
        response = await server.post(path, body)
        assert (response.status_code, response.json()["error"]["reason"]) == (status, reason)
    server.engine.max_pinned = 0
    if path == PIN:
        response = await server.post(path, {"lora_name": "adapter-a"})
        assert (response.status_code, response.json()["error"]["reason"]) == (400, "pin_limit")
    assert not server.engine.pinned


async def test_sglang_s_routes_answer_with_its_fields_besides(server, adapter_paths):
    body = {"lora_name": "new", "lora_path": PATHS[0], "pinned": True}
    answer = (await server.post("/load_lora_adapter", body)).json()
    assert answer["success"] is True
    assert answer["loaded_adapters"] == {**adapter_paths, "new": PATHS[0]}
    assert (answer["id"], answer["state"], answer["pinned"]) == ("new", "resident", True)
    answer = (await server.post("/unload_lora_adapter", {"lora_name": "new"})).json()
    assert (answer["success"], answer["deleted"], answer["loaded_adapters"]) == (True, True, adapter_paths)


async def test_sglang_s_routes_answer_so_to_errors_too(server, adapter_paths):
    for path, body, status, reason in (
        ("/load_lora_adapter", {"lora_name": "adapter-a", "lora_path": PATHS[0]}, 400, "adapter_exists"),
        ("/unload_lora_adapter", {"lora_name": "nobody"}, 404, "unknown_adapter"),
    ):
        response = await server.post(path, body)
        answer = response.json()
        assert (response.status_code, answer["success"]) == (status, False)
        assert answer["error"]["reason"] == reason
        assert answer["error_message"] == answer["error"]["message"]
        assert answer["loaded_adapters"] == adapter_paths
