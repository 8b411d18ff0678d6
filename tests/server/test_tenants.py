"""Tenants: what a key sees, whose cache it uses, and how much it may ask for."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.errors import PermissionDeniedError
from multilora_jax.server.auth import Keys
from multilora_jax.server.limits import Budget, Limits
from multilora_jax.server.tenants import Caller
from tests.server.harness import figures, wait_for
from tests.server.keyed import KEYS, bearer, keyed_server

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


def body(**fields):
    return {"model": "base", "prompt": "hi", "max_tokens": 2, **fields}


async def ask(server, tenant, **fields):
    return await server.post(COMPLETIONS, body(**fields), headers=bearer(tenant))


async def test_a_key_uses_and_lists_its_adapters_only(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path)
    for tenant, own, others in (("a", "adapter-a", "adapter-b"), ("b", "adapter-b", "adapter-a")):
        assert (await ask(server, tenant, model=own)).status_code == 200
        assert (await ask(server, tenant, model=others)).status_code == 404
        cards = (await server.client.get("/v1/models", headers=bearer(tenant))).json()["data"]
        assert [card["id"] for card in cards] == ["base", own]
    cards = (await server.client.get("/v1/models", headers=bearer("ops"))).json()["data"]
    assert [card["id"] for card in cards] == ["base", "adapter-a", "adapter-b"]
    for key in (None, "mlj-key-of-team-", "mlj-key-of-team-aa", ""):
        assert (await ask(server, key)).status_code == 401


async def test_cached_prefixes_are_never_shared_between_tenants(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path, api_keys=("plain",), admin_keys=("root",))
    forged = json.dumps(["a", None])
    for key, salt in (("a", None), ("b", None), ("plain", None), ("root", None), ("a", "s"), ("b", "s"),
                      ("b", forged), ("plain", forged), ("plain", "s")):  # fmt: skip
        fields = {} if salt is None else {"cache_salt": salt}
        assert (await ask(server, key, **fields)).status_code == 200
    salts = server.engine.salts_seen
    assert len(set(salts)) == len(salts)
    assert None not in salts
    await ask(server, "a")
    assert server.engine.salts_seen[-1] == salts[0]  # its own it finds again


@given(st.tuples(st.text(), st.none() | st.text()), st.tuples(st.text(), st.none() | st.text()))
def test_no_salt_of_one_tenant_comes_out_as_another_s(first, second):
    def salt(pair):
        return Caller(pair[0]).salt(pair[1])

    assert (salt(first) == salt(second)) == (first == second)


async def test_a_server_with_one_tenant_takes_salts_as_they_are(make_server):
    server = make_server(api_keys=("one", "two"))
    for key in ("one", "two"):
        assert (await server.post(COMPLETIONS, body(cache_salt="s"), headers=bearer(key))).status_code == 200
    assert server.engine.salts_seen == ["s", "s"]


async def test_shares_count_by_the_key_s_tenant_whatever_user_is_sent(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path, api_keys=("plain",))
    await ask(server, "a", user="somebody else")
    await ask(server, "plain", user="team-1")
    assert server.engine.tenants_seen == ["a", "team-1"]


async def test_priorities_better_than_the_key_s_are_refused(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path, {"b": {"best_priority": 5}})
    refused = await ask(server, "a", priority=-1)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "priority_too_good")
    assert (await ask(server, "a", priority=3)).status_code == 200
    assert (await ask(server, "b", priority=4)).status_code == 403
    assert (await ask(server, "ops", priority=-100)).status_code == 200
    assert [Caller("t", best_priority=5).priority(asked) for asked in (0, 5, 9)] == [5, 5, 9]
    with pytest.raises(PermissionDeniedError):
        Caller("t", best_priority=0).priority(-1)


async def test_requests_a_minute_of_each_key(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path, {"a": {"requests_per_minute": 2}}, max_queued_requests=9)
    assert [(await ask(server, "a")).status_code for _ in range(3)] == [200, 200, 429]
    refused = await ask(server, "a")
    error = refused.json()["error"]
    assert (error["type"], error["reason"]) == ("RateLimitError", "requests_per_minute")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await server.client.get("/v1/models", headers=bearer("a"))).status_code == 200
    assert (await ask(server, "b")).status_code == 200


async def test_requests_at_once_of_each_key(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path, {"a": {"max_concurrent": 1}})
    server.engine.gate.clear()
    first = asyncio.create_task(ask(server, "a"))
    await wait_for(lambda: len(server.engine.requests) == 1)
    refused = await ask(server, "a", stream=True)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "max_concurrent")
    assert refused.headers["retry-after"] == "1"
    other = asyncio.create_task(ask(server, "b"))
    server.engine.gate.set()
    assert [(await first).status_code, (await other).status_code] == [200, 200]
    assert (await ask(server, "a")).status_code == 200
    assert (await ask(server, "a", prompt="")).status_code == 400  # what fails gives its place back too
    assert (await ask(server, "a")).status_code == 200


async def test_tokens_a_minute_are_those_that_were_used(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path, {"a": {"tokens_per_minute": 60}})
    server.engine.script["hi"] = b"x"
    # 3 tokens of prompt and at most 40 of answer are set aside, and all but 5 of them come back.
    assert [(await ask(server, "a", max_tokens=40)).status_code for _ in range(4)] == [200] * 4
    refused = await ask(server, "a", max_tokens=57)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "tokens_per_minute")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await ask(server, "b", max_tokens=57)).status_code == 200
    refused = (await figures_of(server))["multilora:tenant_requests_refused_total"]
    assert refused[("limit", "tokens_per_minute"), ("tenant", "a")] == 1
    assert sum(refused.values()) == 1


async def figures_of(server):
    server.client.headers.update(bearer("ops"))
    return await figures(server)


def test_a_budget_refills_and_lets_the_largest_in_when_it_is_full():
    budget = Budget(60)
    assert budget.wait(1000, 0.0) == 0  # larger than all there ever is
    budget.take(1000, 0.0)
    assert budget.wait(1, 0.0) == pytest.approx(941)
    assert budget.wait(1, 941.0) == pytest.approx(0)
    budget.take(-5000, 941.0)
    assert budget.wait(60, 941.0) == 0
    budget.take(60, 941.0)
    assert budget.wait(60, 940.0) == pytest.approx(60)  # a clock that went back brings nothing


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 200), st.floats(0, 1))))
def test_a_budget_is_overdrawn_by_one_request_at_most(steps):
    budget, now, used, most = Budget(100), 0.0, 0.0, 0
    for seconds, cost, share in steps:
        now += seconds
        if budget.wait(cost, now) == 0:
            budget.take(cost, now)
            budget.take(-int(cost * (1 - share)), now)
            used += cost - int(cost * (1 - share))
            most = max(most, cost)
    assert used <= 100 + now / 60 * 100 + most + 1e-6


def test_limits_are_none_by_default():
    limits = Limits()
    for _ in range(1000):
        limits.enter(0.0)
        limits.reserve(10**9, 0.0)
    assert limits.active == 1000


def test_keys_are_kept_as_hashes_only():
    keys = Keys(["one"], ["two"], "127.0.0.1")
    assert keys.identify(b"Bearer one").tenant == "default"
    assert keys.identify(b"bearer two").admin
    text = repr([vars(keys), [vars(caller) for caller in keys.callers()]])
    assert "one'" not in text
    assert "two'" not in text
    assert len(KEYS) == 4
