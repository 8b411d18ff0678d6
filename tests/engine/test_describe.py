"""The banner of a starting engine: adapters that were read and those that were not, and never thousands of lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from multilora_jax.engine.describe import MAX_ADAPTERS_SHOWN, describe
from multilora_jax.lora.adapter import Adapter, AdapterVersion
from multilora_jax.models.checkpoint import read_config
from multilora_jax.models.config import ModelConfig


@pytest.fixture
def model(golden_tiny) -> ModelConfig:
    return read_config(golden_tiny / "bases" / "tied")


def loaded(name: str, num_pages: int) -> Adapter:
    layout: Any = SimpleNamespace(rank=8, num_pages=num_pages)
    return Adapter(name, 1, f"/adapters/{name}", version=AdapterVersion("0123456789abcdef" * 4, layout))


def test_an_adapter_s_line_says_what_is_known_of_it(model):
    adapters = [loaded("read", 3), loaded("large", 10), Adapter("new", 2, "/adapters/new")]
    banner = describe("m", model, model.geometry(101, 16), 64, adapters, ["weights in int8", "steps run ahead"])
    assert "context 64 tokens, weights in int8, steps run ahead\n" in banner
    assert "adapter   read: rank 8, 3 pages, 0123456789ab, /adapters/read" in banner
    assert "adapter   new: read when it is first asked for, /adapters/new" in banner
    assert "or 10 adapters like the largest one here" in banner


def test_thousands_of_adapters_take_a_few_lines(model):
    adapters = [Adapter(f"a{i}", i + 1, f"/adapters/a{i}") for i in range(10_000)]
    lines = describe("m", model, model.geometry(101, 16), 64, adapters).splitlines()
    assert len(lines) == 3 + MAX_ADAPTERS_SHOWN
    assert lines[-1].split() == ["and", "9980", "more", "adapters"]
