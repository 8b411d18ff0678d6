"""Fixtures of the HTTP tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.fake_engine import GOLDEN, FakeEngine
from tests.server.harness import Server

ADAPTERS = {"all": "cases/all_linear", "attn": "cases/attn_only", "ranks": "cases/rank_alpha_pattern"}
"""The adapters of `real`: name to folder in golden_tiny."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def adapter_paths() -> dict[str, str]:
    """Two PEFT folders that fit the fake engine's base."""
    cases = {"adapter-a": "all_linear", "adapter-b": "attn_only"}
    return {name: str(GOLDEN / "cases" / case) for name, case in cases.items()}


@pytest.fixture
def make_server(adapter_paths) -> Iterator[Callable[..., Server]]:
    """Builds servers of FakeEngine's arguments; two adapters are loaded unless lora_modules says otherwise."""
    servers: list[Server] = []

    def make(**kwargs: Any) -> Server:
        kwargs.setdefault("lora_modules", adapter_paths)
        servers.append(Server(FakeEngine(**kwargs)))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server) -> Server:
    return make_server()


@pytest.fixture(scope="session")
def real(configs):
    """A warmed-up server over the real engine, with ADAPTERS on the tied base of golden_tiny."""
    from tests.server.real_server import RealServer  # brings jax, which most tests here do without

    modules = {name: str(GOLDEN / path) for name, path in ADAPTERS.items()}
    server = RealServer("tied", configs / "tiny_model", lora_modules=modules)
    yield server
    server.close()
