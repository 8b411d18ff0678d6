"""The floors of a decode step: all of the model's products, and all of its weights."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from multilora_jax.bench import step_floor
from multilora_jax.bench.step_floor import FLOORS, StepFloors
from tests.tiny_engine import tiny_engine


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_every_weight_takes_part(quantization, monkeypatch):
    engine = tiny_engine(enable_lora=False, quantization=quantization)
    shapes, linear = [], step_floor.linear
    monkeypatch.setattr(step_floor, "linear", lambda spec, w, x: shapes.append(tuple(w.shape)) or linear(spec, w, x))
    floors = StepFloors(engine, 4)
    params = engine.runner.params
    weights = [layer[name] for layer in params["layers"] for name in ("qkv", "o", "gate_up", "down")]
    head = params["top"].get("lm_head", params["top"]["embed"])
    assert shapes == [tuple(w.shape) for w in (*weights, head)]
    products: Any = floors._runs["bare products"]()
    assert products.shape == (head.shape[0], 4)
    total = sum(float(np.asarray(x, np.float64).sum()) for x in jax.tree.leaves((weights, head)) if x.ndim == 2)
    assert sum(map(float, floors._runs["weights read once"]())) == pytest.approx(total, rel=1e-4, abs=1e-2)


def test_ratios_are_to_the_median():
    floors = StepFloors(tiny_engine(enable_lora=False), 2)
    assert floors.rows(10.0) == []
    floors.seconds = {FLOORS[0]: [0.001, 0.004, 0.002], FLOORS[1]: [0.005]}
    assert [(row["floor_ms"], row["ratio"]) for row in floors.rows(10.0)] == [(2.0, 5.0), (5.0, 2.0)]
    floors.sample()
    assert all(len(values) == before + 1 for values, before in zip(floors.seconds.values(), (3, 1), strict=True))
