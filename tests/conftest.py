"""Fixtures shared by all tests: where the reference data lies."""

from __future__ import annotations

from pathlib import Path

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
