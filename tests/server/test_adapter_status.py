"""What administrators are told of adapters, and the dry run of a load."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from tests.server.harness import wait_for

pytestmark = pytest.mark.anyio

LIST, VALIDATE = "/v1/lora_adapters", "/v1/validate_lora_adapter"


async def status(server, name):
    response = await server.client.get(f"{LIST}/{name}")
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_life_of_an_adapter_is_told(server):
    before = await status(server, "adapter-a")
    assert (before["state"], before["pages"], before["digest"]) == ("registered", None, None)
    await server.complete(model="adapter-a", max_tokens=1)
    after = await status(server, "adapter-a")
    assert (after["state"], after["pages"], after["rank"], after["pinned"]) == ("resident", 1, 8, False)
    assert len(after["digest"]) == 64
    assert (after["requests_running"], after["requests_waiting"]) == (0, 0)
    await server.post("/v1/pin_lora_adapter", {"lora_name": "adapter-a"})
    assert (await status(server, "adapter-a"))["pinned"] is True
    assert (await server.client.get(f"{LIST}/adapter-x")).json()["error"]["reason"] == "unknown_adapter"


async def test_its_users_are_counted(make_server):
    server = make_server(max_num_seqs=1)
    server.engine.gate.clear()
    asked = [asyncio.create_task(server.complete(model="adapter-b", max_tokens=30)) for _ in range(2)]
    await wait_for(lambda: len(server.engine.requests) >= 1, seconds=20)  # the other may wait for the step
    server.engine.step_seconds = 0.5
    told = asyncio.create_task(status(server, "adapter-b"))
    server.engine.gate.set()
    found = await told
    server.engine.step_seconds = 0
    assert found["requests_running"] + found["requests_waiting"] in (1, 2)
    await asyncio.gather(*asked)


async def test_lists_come_in_pages(server):
    async def listed(**query):
        response = await server.client.get(LIST, params=query)
        assert response.status_code == 200, response.text
        return [card["id"] for card in response.json()["data"]], response.json()["has_more"]

    assert await listed() == (["adapter-a", "adapter-b"], False)
    assert await listed(limit=1) == (["adapter-a"], True)
    assert await listed(limit=1, after="adapter-a") == (["adapter-b"], False)
    assert await listed(state="resident") == ([], False)
    await server.complete(model="adapter-b", max_tokens=1)
    assert await listed(state="resident") == (["adapter-b"], False)
    for query, param in (({"limit": 0}, "limit"), ({"state": "x"}, "state"), ({"after": "x"}, "after")):
        response = await server.client.get(LIST, params=query)
        assert (response.status_code, response.json()["error"]["param"]) == (404 if param == "after" else 400, param)


async def test_a_dry_run_says_what_a_load_would_and_loads_nothing(server, adapter_paths, tmp_path):
    answer = (await server.post(VALIDATE, {"lora_path": adapter_paths["adapter-a"]})).json()
    assert (answer["valid"], answer["rank"], answer["pages"], answer["own_tokenizer"]) == (True, 8, 1, False)
    assert len(server.engine.list_loras()) == 2
    assert len(server.engine.host) == 0
    broken = tmp_path / "broken"
    shutil.copytree(adapter_paths["adapter-a"], broken)
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    for path in (str(broken), str(tmp_path / "nothing"), str(tmp_path), "", "a\0b"):
        dry = await server.post(VALIDATE, {"lora_path": path})
        load = await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
        assert (dry.status_code, dry.json()["error"]["reason"]) == (
            load.status_code, load.json()["error"]["reason"],
        )  # fmt: skip
        assert dry.status_code in (400, 404)
    assert (await server.complete(max_tokens=1))["choices"]


async def test_d24_a_dry_run_tells_nothing_of_what_lies_outside_the_roots(make_server, tmp_path, adapter_paths):
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to(adapter_paths["adapter-a"])
    server = make_server(adapter_roots=(str(root),))
    for path in ("/etc", "/no/such", f"{root}/../x", f"{root}/out", "../../etc"):
        response = await server.post(VALIDATE, {"lora_path": path})
        assert (response.status_code, response.json()["error"]["reason"]) == (403, "path_outside_roots")
