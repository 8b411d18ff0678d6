"""X-Request-Id in and out, routes that are not served, the document of all that are."""

from __future__ import annotations

import pytest

from multilora_jax.server.unserved import UNSERVED

pytestmark = pytest.mark.anyio

BODY = {"model": "base", "prompt": "hi", "max_tokens": 1}
PATH = "/v1/completions"


async def test_an_id_that_is_sent_comes_back_and_names_the_answer(server):
    response = await server.post(PATH, BODY, headers={"X-Request-Id": "abc-1"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("abc-1", "cmpl-abc-1")
    response = await server.post(PATH, {**BODY, "request_id": "own"}, headers={"X-Request-Id": "abc-1"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("abc-1", "cmpl-own")
    response = await server.post(PATH, {**BODY, "stream": True}, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert '"id":"cmpl-abc-1"' in response.text


async def test_without_one_there_is_a_new_one_each_time(server):
    answers = [await server.post(PATH, BODY) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert [answer.json()["id"] for answer in answers] == [f"cmpl-{i}" for i in ids]
    response = await server.post(PATH, {**BODY, "request_id": "own"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("own", "cmpl-own")
    response = await server.post(PATH, {**BODY, "request_id": "é"})
    assert response.json()["id"] == "cmpl-é"
    assert response.headers["x-request-id"].isascii()


async def test_errors_carry_it_too(make_server):
    server = make_server(api_keys=("sk",))
    sent = {"X-Request-Id": "abc"}
    for path in (PATH, "/nowhere"):
        assert (await server.post(path, BODY, headers=sent)).headers["x-request-id"] == "abc"
    sent["Authorization"] = "Bearer sk"
    assert (await server.post(PATH, {**BODY, "model": "x"}, headers=sent)).headers["x-request-id"] == "abc"
    assert (await server.client.get("/health", headers={"X-Request-Id": "h"})).headers["x-request-id"] == "h"
    response = await server.post(PATH, {**BODY, "prompt": "BUG"}, headers=sent)
    assert (response.status_code, response.headers["x-request-id"]) == (500, "abc")


@pytest.mark.parametrize("bad", ["", "a b", "x" * 257, b"\xe9"])
async def test_one_that_is_no_id_is_refused(server, bad):
    response = await server.post(PATH, BODY, headers={"X-Request-Id": bad})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "X-Request-Id")
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", [*UNSERVED, "/v1/audio/speech", "/v1/responses/resp_1/cancel", "/v1/embeddings/"])
async def test_what_is_not_served_says_so(server, path):
    for method in ("POST", "GET", "DELETE"):
        response = await server.client.request(method, path, json={} if method == "POST" else None)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["reason"]) == (404, "NotFoundError", "not_served")
        assert "is not served here: " in error["message"]
    assert (await server.client.get("/v1/audiobooks")).json()["error"]["reason"] == "not_found"
