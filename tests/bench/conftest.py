"""Engines of few compiled shapes for the benchmark commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import adapters, cold_bench, runs
from multilora_jax.engine.llm_engine import LLMEngine
from tests.tiny_engine import narrowed


@pytest.fixture
def narrow_engines(monkeypatch) -> list[LLMEngine]:
    """Makes commands build narrowed engines; those they built, in order."""
    built: list[LLMEngine] = []

    def build(*args: Any, **kwargs: Any) -> LLMEngine:
        built.append(narrowed(LLMEngine(*args, progress=False, **kwargs)))
        return built[-1]

    for module in (adapters, cold_bench, runs):
        monkeypatch.setattr(module, "LLMEngine", build)
    return built


@pytest.fixture
def run_tiny(configs: Path) -> Callable[..., int]:
    """run_tiny(command, words, *more) runs a command on the tiny model, with its words in one text and single ones."""

    def run(command: ModuleType, words: str = "", *more: str) -> int:
        values = absl_flags.FlagValues()
        command.define_flags(values)
        values(flags.normalise_argv(["bench", "--config", str(configs / "tiny.yaml"), *words.split(), *more]))
        return command.main([], values)

    return run
