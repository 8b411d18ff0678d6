"""Engines of few compiled shapes for the benchmark commands."""

from __future__ import annotations

from typing import Any

import pytest

from multilora_jax.bench import adapters, cold_bench
from multilora_jax.engine.llm_engine import LLMEngine
from tests.tiny_engine import narrowed


@pytest.fixture
def narrow_engines(monkeypatch) -> list[LLMEngine]:
    """Makes `bench adapters` build narrowed engines; those it built, in order."""
    built: list[LLMEngine] = []

    def build(*args: Any, **kwargs: Any) -> LLMEngine:
        built.append(narrowed(LLMEngine(*args, progress=False, **kwargs)))
        return built[-1]

    for module in (adapters, cold_bench):
        monkeypatch.setattr(module, "LLMEngine", build)
    return built
