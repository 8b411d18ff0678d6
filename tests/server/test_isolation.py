"""Every route tried against another tenant's adapters, cache and figures: what may not be seen does not exist."""

from __future__ import annotations

import json

import pytest

from multilora_jax.errors import NotFoundError
from multilora_jax.server.page_files import PAGE_PATHS
from tests.server.harness import Server
from tests.server.keyed import bearer, keyed_server
from tests.server.test_auth import routes

pytestmark = pytest.mark.anyio

OPEN, SCRAPER, ADMIN, COMPARE = "open", "scraper", "admin", "compare"
"""Routes without a key, those of who may read the figures, those of administrators, and the page's comparison."""


class Tokens(dict):
    """Fields of a route that generates nothing and knows no mixes."""


MESSAGES = [{"role": "user", "content": "hi"}]

ROUTES: dict[tuple[str, str], object] = {
    ("GET", "/health"): OPEN,
    ("GET", "/ready"): OPEN,
    ("GET", "/version"): OPEN,
    ("GET", "/metrics"): SCRAPER,
    ("GET", "/openapi.json"): None,
    ("GET", "/v1/models"): None,
    ("GET", "/v1/models/{name:path}"): None,
    ("POST", "/v1/completions"): {"prompt": "hi"},
    ("POST", "/v1/chat/completions"): {"messages": MESSAGES},
    ("POST", "/tokenize"): Tokens({"prompt": "hi"}),
    ("POST", "/detokenize"): Tokens({"tokens": [1]}),
    ("POST", "/page/compare"): COMPARE,
    ("GET", "/page/live"): ADMIN,
    **{("GET", path): OPEN for path in PAGE_PATHS},
    ("GET", "/v1/lora_adapters"): ADMIN,
    ("GET", "/v1/lora_adapters/{name:path}"): ADMIN,
    ("POST", "/v1/validate_lora_adapter"): ADMIN,
    ("POST", "/v1/load_lora_adapter"): ADMIN,
    ("POST", "/v1/unload_lora_adapter"): ADMIN,
    ("POST", "/v1/pin_lora_adapter"): ADMIN,
    ("POST", "/v1/unpin_lora_adapter"): ADMIN,
    ("POST", "/load_lora_adapter"): ADMIN,
    ("POST", "/unload_lora_adapter"): ADMIN,
}
"""Every route, each of a kind above, or what a tenant sends there beside a model's name (None: nothing)."""

SECRET, UNKNOWN = "b-secret", "b-nobody"
"""An adapter of tenant b, and a name that nobody has, both as long and in the same patterns."""


@pytest.fixture
def server(make_server, tmp_path, adapter_paths) -> Server:
    paths = list(adapter_paths.values())
    modules = {"adapter-a": paths[0], SECRET: paths[1]}
    return keyed_server(make_server, tmp_path, {"b": {"adapters": ["b-*"]}}, lora_modules=modules)


def test_every_route_is_classified(server):
    """A new route fails here until it stands in ROUTES: say there who may call it, and it is attacked below."""
    assert {route for route in routes(server) if not route[1].startswith(("/docs", "/redoc"))} == set(ROUTES)


def naming(kind: object, name: str) -> list[dict[str, object]]:
    """Bodies that name an adapter in every way there is."""
    if kind == COMPARE:
        request = {"prompt": "hi", "max_tokens": 1}
        return [{"models": [model], "route": "completions", "request": request} for model in (name, f"base:{name}")]
    if kind == ADMIN:
        return [{"lora_name": name}, {"lora_name": name, "lora_path": "x", "load_inplace": True}]
    fields = kind if isinstance(kind, dict) else {}
    if isinstance(kind, Tokens):
        return [{"model": name, **fields}, {"model": f"base:{name}", **fields}]
    return [
        {"model": name, **fields},
        {"model": f"base:{name}", **fields},
        {"model": "base", "lora": [{"name": name}], **fields},
        {"model": "base", "lora": [{"name": "adapter-a"}, {"name": name, "scale": 0.5}], **fields},
        {"model": "base", "lora": {"name": f"base:{name}"}, **fields},
        {"model": name, "stream": True, **fields},
    ]


async def answers(server: Server, method: str, path: str, kind: object, name: str, tenant: str) -> list[tuple]:
    """What a tenant is told in every way it may name an adapter, the name itself written as NAME."""
    found = []
    target = path.replace("{name:path}", name)
    bodies = naming(kind, name) if method == "POST" else [None]
    for content in bodies:
        response = await server.client.request(method, target, json=content, headers=bearer(tenant))
        headers = {k: v for k, v in response.headers.items() if k not in ("x-request-id", "content-length")}
        found.append((response.status_code, response.text.replace(name, "NAME"), headers))
    return found


@pytest.mark.parametrize(("method", "path"), sorted(ROUTES))
async def test_another_tenant_s_adapter_is_answered_as_one_that_is_not_there(server, method, path):
    kind = ROUTES[method, path]
    # It is in memory and in use, as far as b goes.
    used = await server.post("/v1/completions", {"model": SECRET, "prompt": "hi"}, headers=bearer("b"))
    assert used.status_code == 200
    got = [await answers(server, method, path, kind, name, "a") for name in (SECRET, UNKNOWN)]
    assert got[0] == got[1]
    for status, text, _ in got[0]:
        assert "secret" not in text
        assert "adapter-b" not in text
        if kind in (ADMIN, SCRAPER):
            assert status == 403
        elif kind == COMPARE:
            assert (status, "unknown_adapter" in text) == (200, True)
        elif isinstance(kind, dict):
            assert (status, json.loads(text)["error"]["reason"]) == (404, "unknown_adapter")
    if path == "/v1/models/{name:path}":
        assert got[0][0][0] == 404
    assert SECRET in {adapter.name for adapter in server.engine.list_loras()}
    assert not server.engine.pinned


@pytest.mark.parametrize(("method", "path"), sorted(ROUTES))
async def test_without_a_key_nothing_but_the_probes_answers(server, method, path):
    kind = ROUTES[method, path]
    for tenant in (None, "mlj-wrong"):
        for status, text, _ in await answers(server, method, path, kind, SECRET, tenant or ""):
            assert (status == 401) == (kind != OPEN)
            assert "secret" not in text


@pytest.mark.parametrize("path", [path for (_, path), kind in ROUTES.items() if type(kind) is dict])
async def test_every_route_that_generates_does_so_in_the_caller_s_own_cache(server, path):
    kind = ROUTES["POST", path]
    assert isinstance(kind, dict)
    for tenant in ("a", "b", "ops"):
        answer = await server.post(path, {"model": "base", **kind, "max_tokens": 1}, headers=bearer(tenant))
        assert answer.status_code == 200, answer.text
    assert [json.loads(salt) for salt in server.engine.salts_seen] == [["a", None], ["b", None], ["ops", None]]
    assert server.engine.tenants_seen == ["a", "b", "ops"]


async def test_the_figures_are_for_scrapers_and_administrators(server):
    got = {}
    for tenant in ("a", "scraper", "ops"):
        response = await server.client.get("/metrics", headers=bearer(tenant))
        got[tenant] = response.status_code
        assert ("tenant_requests" in response.text) == (tenant != "a")
    assert got == {"a": 403, "scraper": 200, "ops": 200}
    # A scraper's key opens nothing else.
    refused = await server.post("/v1/completions", {"model": SECRET, "prompt": "hi"}, headers=bearer("scraper"))
    assert refused.status_code == 404
    assert (await server.post("/v1/pin_lora_adapter", {}, headers=bearer("scraper"))).status_code == 403


@pytest.mark.parametrize(
    ("config", "status"),
    [({}, 200), ({"api_keys": ("k",)}, 401), ({"admin_keys": ("k",)}, 401),
     ({"admin_keys": ("k",), "metrics_public": True}, 200)],
)  # fmt: skip
async def test_the_figures_are_closed_once_there_are_keys(make_server, config, status):
    server = make_server(**config)
    assert (await server.client.get("/metrics")).status_code == status
    assert (await server.client.get("/metrics", headers=bearer("k"))).status_code == 200


async def test_with_a_keys_file_and_no_admin_key_nobody_manages(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path, {"ops": {"admin": False}})
    for method, path in [route for route, kind in ROUTES.items() if kind == ADMIN]:
        content = {"lora_name": "adapter-a"} if method == "POST" else None
        refused = await server.client.request(method, path, json=content, headers=bearer("a"))
        assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "management_closed")


async def test_an_adapter_unloaded_between_two_looks_leaks_no_names(server, monkeypatch):
    """The engine's own error lists every name there is: the view writes it anew."""

    async def submit(*_, **__):
        server.engine.lora_request("a-gone")

    monkeypatch.setattr(server.async_engine, "submit", submit)
    error = await server.post("/v1/completions", {"model": "adapter-a", "prompt": "hi"}, headers=bearer("a"))
    assert error.status_code == 404
    assert "a-gone" in error.text
    assert SECRET not in error.text
    with pytest.raises(NotFoundError, match=SECRET):
        await submit()
