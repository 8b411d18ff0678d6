"""The page's routes: files and their headers, the live data, and one prompt to several models."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from multilora_jax.memory.allocator import PageKind
from multilora_jax.server.page_files import HEADERS, NAMES, PAGE_PATHS, page_file
from tests.server.fake_engine import PAGES
from tests.server.harness import Server, parse_events, wait_for
from tests.server.keyed import KEYS, write_keys
from tests.server.pool_engine import PoolEngine
from tests.server.test_auth import bearer

pytestmark = pytest.mark.anyio

FOLDER = Path(__file__).parent.parent.parent / "multilora_jax" / "server" / "page"
API, ADMIN = "sk-api", "sk-admin"


@pytest.fixture
def make_page(adapter_paths):
    servers = []

    def make(**config):
        config.setdefault("lora_modules", adapter_paths)
        servers.append(Server(PoolEngine(**config)))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


# ---- files


async def test_every_file_comes_with_a_strict_policy(make_page):
    client = make_page(api_keys=(API,), admin_keys=(ADMIN,), host="0.0.0.0").client
    for path in sorted(PAGE_PATHS):
        response = await client.get(path)
        assert response.status_code == 200, path
        assert HEADERS.items() <= dict(response.headers).items() | {(k, response.headers.get(k)) for k in HEADERS}
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        again = await client.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/page/", "/page/index.html", "/page/../page_files.py", "/page/main.py", "/page"):
        assert (await client.get(path)).status_code in (401, 404), path


def test_the_folder_holds_the_listed_files_and_nothing_else():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(NAMES)
    with pytest.raises(KeyError):
        page_file("../page_files.py")


def test_nothing_is_asked_of_elsewhere_and_no_text_becomes_markup():
    for name in NAMES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"'`)]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not urls, (name, urls)
        words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
        assert not re.findall(words, text), name
        assert not re.findall(r"<[^>]*\s(?:on\w+|style)=", text), (name, "inline handlers and styles are refused")
        if name.endswith(".js"):
            assert len(text.splitlines()) <= 350, name
            for module in re.findall(r'from "\./([\w.]+)"', text):
                assert module in NAMES
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", (FOLDER / "index.html").read_text(), re.DOTALL)
    assert scripts
    assert all("src=" in attributes and not content for attributes, content in scripts)


async def test_the_page_can_be_turned_off(make_server):
    client = make_server(page=False).client
    for path in (*sorted(PAGE_PATHS), "/page/live"):
        assert (await client.get(path)).status_code == 404, path
    assert (await client.post("/page/compare", json={})).status_code == 404
    assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.slow
def test_a_wheel_contains_the_page(tmp_path):
    root = FOLDER.parent.parent.parent
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-cache-dir",
        "-q",
        "-w",
        str(tmp_path),
        str(root),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if "server/page/" in name}
    assert packed == {f"multilora_jax/server/page/{name}": page_file(name).content for name in NAMES}


# ---- live


async def test_who_may_see_the_live_view(make_page):
    keyed = make_page(api_keys=(API,), admin_keys=(ADMIN,), host="0.0.0.0")
    got = [(await keyed.client.get("/page/live", headers=bearer(key))) for key in (None, "sk-wrong", API, ADMIN)]
    assert [response.status_code for response in got] == [401, 401, 403, 200]
    assert got[2].json()["error"]["reason"] == "admin_key_required"
    assert "adapter-a" not in got[2].text
    open_to_all = make_page(host="0.0.0.0")
    response = await open_to_all.client.get("/page/live")
    assert (response.status_code, response.json()["error"]["reason"]) == (403, "management_closed")
    assert (await make_page().client.get("/page/live")).status_code == 200, "on this machine alone, without keys"


async def test_the_live_view_of_a_starting_server(make_page):
    server = make_page()
    server.app.state.context._engine = None
    response = await server.client.get("/page/live")
    assert (response.status_code, response.json()["error"]["reason"]) == (503, "starting")


async def test_what_the_live_view_tells(make_page):
    server = make_page()
    await server.complete(model="adapter-a", prompt="abc", max_tokens=4)
    await server.complete(model="base", prompt="abc", max_tokens=2)
    server.engine.allocator.allocate(7, PageKind.KV)
    state = (await server.client.get("/page/live")).json()
    rows = {row["name"]: row for row in state["adapters"]["rows"]}
    assert list(rows) == ["adapter-a", "adapter-b"]
    row = rows["adapter-a"]
    assert (row["tier"], row["pinned"], row["requests"], row["tokens"]) == ("resident", False, 1, 4)
    assert (rows["adapter-b"]["tier"], rows["adapter-b"]["rank"]) == ("registered", None)
    assert row["slot"] != rows["adapter-b"]["slot"]
    assert sum(point[1] for point in state["history"]["points"]) == 6
    assert state["history"]["points"][-1][3] is not None or len(state["history"]["points"]) > 1
    assert state["pool"]["full"]
    assert sum(run[1] for run in state["pool"]["runs"]) == state["pool"]["cells"] == PAGES
    assert state["pool"]["runs"][0] == [0, 7, 1, 1]
    assert state["model"]["name"] == "base"


async def test_a_second_look_holds_what_changed(make_page, monkeypatch):
    monkeypatch.setattr("multilora_jax.server.live.SHARED_S", 0.0)
    server = make_page()
    first = (await server.client.get("/page/live")).json()
    server.engine.allocator.allocate(3, PageKind.KV)
    look = {"params": {"cursor": first["cursor"]}}
    second = (await server.client.get("/page/live", **look)).json()
    assert not second["pool"]["full"]
    assert second["pool"]["runs"] == [[0, 3, 1, 1]]
    assert len(second["history"]["points"]) <= 2
    for cursor in ("", "nonsense", "x.1.2", first["cursor"] + "9.9", first["cursor"].replace(".", "x")):
        state = (await server.client.get("/page/live", params={"cursor": cursor})).json()
        assert state["pool"]["full"], cursor
    assert (await server.client.get("/page/live", params={"cursor": "x" * 65})).status_code == 400


async def test_many_viewers_cost_the_engine_one_look(make_page):
    server = make_page()
    looks = []
    stats = server.engine.stats
    server.engine.stats = lambda: looks.append(1) or stats()
    await asyncio.gather(*(server.client.get("/page/live") for _ in range(20)))
    assert len(looks) == 1


async def test_many_adapters_are_listed_in_part(make_page, adapter_paths, monkeypatch):
    monkeypatch.setattr("multilora_jax.server.live.MAX_ROWS", 3)
    modules = {f"n{i}": adapter_paths["adapter-a"] for i in range(9)}
    server = make_page(lora_modules=modules)
    await server.complete(model="n7", prompt="abc", max_tokens=1)
    rows = (await server.client.get("/page/live")).json()["adapters"]["rows"]
    assert next(row["name"] for row in rows) in ("n7", "n0")
    assert len(rows) == 3
    monkeypatch.setattr("multilora_jax.server.live.SHARED_S", 0.0)
    rows = (await server.client.get("/page/live")).json()["adapters"]["rows"]
    assert [row["name"] for row in rows] == ["n7", "n0", "n1"]


# ---- compare


async def compared(server, headers=None, **body):
    response = await server.client.post("/page/compare", json=body, headers=headers or {})
    assert response.status_code == 200, response.text
    by_index = {}
    for event in parse_events(response):
        by_index.setdefault(event["index"], []).append(event)
    return by_index


def text_of(events):
    pieces = [choice for event in events if "chunk" in event for choice in event["chunk"]["choices"]]
    return "".join(piece["delta"].get("content", "") if "delta" in piece else piece["text"] for piece in pieces)


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_one_prompt_to_several_models(make_page, route):
    server = make_page()
    prompt = {"prompt": "hi"} if route == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    models = ["base", "adapter-a", "adapter-b"]
    found = await compared(server, models=models, route=route, request={**prompt, "max_tokens": 12})
    assert [text_of(found[index])[:9] for index in range(3)] == ["base:abcd", "adapter-a", "adapter-b"]
    for events in found.values():
        assert events[-1] == {"index": events[0]["index"], "done": True}
        assert events[-2]["chunk"]["usage"]["completion_tokens"] == 12


async def test_they_run_in_one_batch(make_page):
    server = make_page(step_seconds=0.005)
    models, request = ["base", "adapter-a", "adapter-b"], {"prompt": "x", "max_tokens": 60}
    await compared(server, models=models, route="completions", request=request)
    assert server.engine.together == 3


async def test_one_that_is_refused_leaves_the_others(make_page):
    server = make_page()
    found = await compared(server, models=["base", "nobody"], route="completions", request={"prompt": "x"})
    assert text_of(found[0]).startswith("base:")
    assert (found[1][0]["error"]["code"], found[1][0]["error"]["reason"]) == (404, "unknown_adapter")
    found = await compared(server, models=["base"], route="completions", request={"prompt": "x", "max_tokens": -1})
    assert found[0][0]["error"]["param"] == "max_tokens"


async def test_a_caller_who_leaves_ends_all_of_them(make_page):
    server = make_page(step_seconds=0.3)  # they would run for half a minute
    work = asyncio.create_task(
        compared(server, models=["base", "adapter-a"], route="completions", request={"prompt": "x", "max_tokens": 100})
    )
    await wait_for(lambda: len(server.engine.requests) == 2, 20)
    work.cancel()
    await wait_for(lambda: not server.engine.requests, 20)


async def test_a_comparison_carries_the_caller_s_key_and_limits(make_page):
    server = make_page(api_keys=(API,), adapter_requests_per_s=0.01, adapter_request_burst=1)
    body = {"models": ["adapter-a"], "route": "completions", "request": {"prompt": "x", "max_tokens": 1}}
    assert (await server.client.post("/page/compare", json=body)).status_code == 401
    await compared(server, bearer(API), **body)
    [event, _] = (await compared(server, bearer(API), **body))[0]
    assert event["error"]["code"] == 429
    assert int(event["retry_after_s"]) > 0


async def test_a_comparison_counts_as_its_completions_and_no_more(make_page, tmp_path):
    server = make_page(keys_file=write_keys(tmp_path, a={"requests_per_minute": 3, "max_concurrent": 2}))
    headers = {"Authorization": f"Bearer {KEYS['a']}"}
    body = {"models": ["base", "adapter-a"], "route": "completions", "request": {"prompt": "x", "max_tokens": 1}}
    found = await compared(server, headers, **body)
    assert [text_of(found[index]) for index in range(2)] == ["b", "a"]
    found = await compared(server, headers, **body)  # one is left of the three of this minute
    refused = [event["error"]["reason"] for events in found.values() for event in events if "error" in event]
    assert refused == ["requests_per_minute"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"models": []}, "models"),
        ({"models": [f"m{i}" for i in range(10)]}, "models"),
        ({"models": ["base", "base"]}, "models"),
        ({"models": "base"}, "models"),
        ({"route": "embeddings"}, "route"),
        ({"request": {"prompt": "x", "stream": False}}, "stream"),
        ({"request": {"prompt": "x", "model": "base"}}, "model"),
        ({"temperature": 1}, "temperature"),
    ],
)
async def test_a_bad_comparison_is_refused_by_name(make_page, change, param):
    body = {"models": ["base"], "route": "completions", "request": {"prompt": "x"}, **change}
    response = await make_page().client.post("/page/compare", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
