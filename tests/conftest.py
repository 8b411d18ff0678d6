"""Fixtures shared by all tests: where the reference data lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("project", deadline=None, print_blob=True)  # a busy machine is no failure
settings.load_profile("project")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def golden_tiny() -> Path:
    """Folder of PEFT reference cases on tiny bases (see its README)."""
    return ROOT / "tests" / "data" / "golden_tiny"


@pytest.fixture(scope="session")
def smollm2_golden() -> Path:
    """Folder of reference generations of SmolLM2-135M, one JSON file for the base and for each adapter."""
    return ROOT / "tests" / "data" / "smollm2_golden"


@pytest.fixture(scope="session")
def configs() -> Path:
    """Folder of the shipped configurations, with the trained adapters."""
    return ROOT / "configs"


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


@pytest.fixture
def make_engine():
    """Builds an AsyncEngine over a FakeEngine of the given arguments; both are returned."""
    from multilora_jax.async_engine import AsyncEngine
    from tests.server.fake_engine import FakeEngine

    made: list[tuple[AsyncEngine, FakeEngine]] = []

    def make(stall_after_s: float = 120.0, **arguments: Any) -> tuple[AsyncEngine, FakeEngine]:
        fake = FakeEngine(max_model_len=10_000, **arguments)
        made.append((AsyncEngine(fake, stall_after_s=stall_after_s), fake))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine, fake in made:
        fake.gate.set()
        for gate in fake.builder.gates.values():
            gate.set()
        engine.shutdown(drain=False)
