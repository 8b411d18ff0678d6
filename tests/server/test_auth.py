"""Keys: who may call which route."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from multilora_jax.server.adapters import management
from multilora_jax.server.auth import OPEN_PATHS, is_loopback
from multilora_jax.server.page_files import PAGE_PATHS

pytestmark = pytest.mark.anyio

API, ADMIN = "sk-api", "sk-admin"
MANAGEMENT = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/pin_lora_adapter", "/v1/unpin_lora_adapter",
    "/load_lora_adapter", "/unload_lora_adapter", "/v1/validate_lora_adapter",
)  # fmt: skip
STATUS = ("/v1/lora_adapters", "/v1/lora_adapters/{name:path}")
"""Management routes that only tell."""
INFERENCE = (
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/v1/models"), ("POST", "/page/compare"),
)  # fmt: skip


def bearer(key):
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def status(server, method, path, key):
    """Status of a request whose body is empty: 400 once it is let in, before that nothing of it is looked at."""
    response = await server.client.request(method, path, json={}, headers=bearer(key))
    if response.status_code in (401, 403):
        error = response.json()["error"]
        kind = "AuthenticationError" if response.status_code == 401 else "PermissionDeniedError"
        assert (error["type"], error["code"]) == (kind, response.status_code)
        assert not any(secret in response.text for secret in (API, ADMIN, "sk-wrong"))
    if response.status_code == 401:
        assert response.headers["www-authenticate"] == "Bearer"
    return response.status_code


def routes(server):
    return [(method, r.path) for r in all_routes(server.app.routes) for method in (r.methods or set()) - {"HEAD"}]


def all_routes(found):
    for route in found:
        if isinstance(route, Route):
            yield route
        else:
            yield from all_routes(route.original_router.routes)


async def test_d26_management_needs_the_admin_key(make_server):
    server = make_server(api_keys=(API, "sk-other"), admin_keys=(ADMIN,), host="0.0.0.0")
    for path in MANAGEMENT:
        got = [await status(server, "POST", path, key) for key in (None, "sk-wrong", API, "sk-other", ADMIN)]
        assert got == [401, 401, 403, 403, 400]
    for path in STATUS:
        got = [await status(server, "GET", path, key) for key in (None, "sk-wrong", API, "sk-other")]
        assert got == [401, 401, 403, 403]
        assert await status(server, "GET", path.replace("{name:path}", "adapter-a"), ADMIN) == 200
    for method, path in INFERENCE:
        got = [await status(server, method, path, key) for key in (None, "sk-wrong", API, ADMIN)]
        assert got[:2] == [401, 401]
        assert not {401, 403} & set(got[2:])


async def test_d26_every_route_that_changes_something_is_a_management_route(make_server):
    """A new route must be added to one of the lists above, and to the other if it is not inference."""
    found = {route.path for route in management.routes if isinstance(route, Route)}
    assert found == {*MANAGEMENT, *STATUS}
    changing = {(method, path) for method, path in routes(make_server()) if method not in ("GET", "HEAD")}
    assert changing == {("POST", path) for path in MANAGEMENT} | {("POST", p) for m, p in INFERENCE if m == "POST"}


async def test_d26_the_admin_can_manage(make_server, adapter_paths):
    server = make_server(api_keys=(API,), admin_keys=(ADMIN,), lora_modules={})
    load = {"lora_name": "a", "lora_path": adapter_paths["adapter-a"]}
    order = ("/v1/validate", "/v1/load", "/v1/pin", "/v1/unpin", "/v1/unload", "/load", "/unload")
    assert sorted(f"{start}_lora_adapter" for start in order) == sorted(MANAGEMENT)
    for start in order:
        path, body = f"{start}_lora_adapter", load if start.endswith("/load") else {"lora_name": "a"}
        body = {"lora_path": load["lora_path"]} if start == "/v1/validate" else body
        assert (await server.client.post(path, json=body, headers=bearer(API))).status_code == 403
        assert (await server.client.post(path, json=body, headers=bearer(ADMIN))).status_code == 200


async def test_d26_every_route_is_known_and_protected(make_server):
    server = make_server(api_keys=(API,), admin_keys=(ADMIN,))
    found = routes(server)
    assert {path for _, path in found} >= {path for _, path in INFERENCE} | set(MANAGEMENT) | OPEN_PATHS
    for method, path in found:
        for key in (None, "sk-wrong"):
            expected_open = path in OPEN_PATHS
            assert (await status(server, method, path, key) == 401) != expected_open, path
    assert sorted(OPEN_PATHS - PAGE_PATHS) == ["/health", "/ready", "/version"]
    assert await status(server, "GET", "/v1/nothing", None) == 401


async def test_d26_admin_keys_alone_leave_inference_open(make_server):
    server = make_server(admin_keys=(ADMIN,), host="0.0.0.0")
    for method, path in INFERENCE:
        assert await status(server, method, path, None) in (200, 400)
    for path in MANAGEMENT:
        assert [await status(server, "POST", path, key) for key in (None, API, ADMIN)] == [401, 401, 400]


@pytest.mark.parametrize(
    ("host", "let_in"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.5", False), ("example.org", False)],
)  # fmt: skip
async def test_d26_without_an_admin_key_management_is_for_this_machine(make_server, host, let_in):
    assert is_loopback(host) == let_in
    server = make_server(host=host)
    for path in MANAGEMENT:
        assert await status(server, "POST", path, None) == (400 if let_in else 403)
    server = make_server(host=host, api_keys=(API,))
    for path in MANAGEMENT:
        got = [await status(server, "POST", path, key) for key in (None, "sk-wrong", API)]
        assert got == [401, 401, 400 if let_in else 403]


@pytest.mark.parametrize(
    "header", ["sk-api", "Basic sk-api", "Bearer", "Bearer ", "Bearer sk-ap", "Bearer sk-apii", "Bearer ü"]
)
async def test_d26_headers_that_are_no_key(make_server, header):
    server = make_server(api_keys=(API,))
    headers = {"Authorization": header.encode()}
    assert (await server.client.get("/v1/models", headers=headers)).status_code == 401


async def test_the_scheme_is_read_without_regard_to_case(make_server):
    server = make_server(api_keys=("schlüssel",))
    headers = {"Authorization": "bearer schlüssel".encode()}
    assert (await server.client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_body_is_not_read_before_the_key(make_server):
    server = make_server(api_keys=(API,))
    response = await server.client.post("/v1/completions", content="{", headers={"Content-Type": "application/json"})
    assert response.status_code == 401
