"""What four devices send each other, and what each holds, from programs compiled for four virtual ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path

import pytest

from tests.engine.test_tensor_parallel import worker_env
from tests.plan.mesh_worker import PARTS, TP, T
from tests.plan.models import SMALL

ROOT = Path(__file__).parent.parent.parent
BASE_SHAPE = sorted((T, SMALL.hidden_size))


def run_worker(part):
    """What mesh_worker.py printed."""
    command = [sys.executable, "-W", "error", "-m", "tests.plan.mesh_worker", part]
    done = subprocess.run(command, cwd=ROOT, env=worker_env(TP), capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seen():
    return run_worker("quick")


def shapes_of(collectives):
    return [shape for collective in collectives for shape in collective["shapes"]]


def check_layer(seen, part, dtype):
    """No collective as wide as the base's is added, and what is sent follows the formula, however many adapters."""
    _, ranks, adapters = PARTS[part]
    base, *rows = seen[dtype]
    assert [sorted(shape) for shape in shapes_of(base["collectives"])] == [BASE_SHAPE] * 2
    cases = [(row["reach"], row["adapters"], row["rank"]) for row in rows]
    assert cases == [(reach, n, r) for reach in (0, 1) for n in adapters for r in ranks]
    for row in rows:
        shapes = shapes_of(row["collectives"])
        assert {c["kind"] for c in row["collectives"]} == {"all-reduce"}
        assert [sorted(shape) for shape in shapes].count(BASE_SHAPE) == 2
        added = sorted(prod(shape) for shape in shapes if sorted(shape) != BASE_SHAPE)
        modules = [1, 3] if row["reach"] == 0 else [1, 1, 2, 3]
        assert added == [n * T * row["rank"] for n in modules]
        assert row["added"] == pytest.approx(row["formula"])
        units = 5 if row["reach"] == 0 else 9  # S-LoRA's, in (N-1) B r / N
        assert row["slora"] == pytest.approx(units * (TP - 1) / TP * T * row["rank"])
        assert row["added"] / row["slora"] == pytest.approx(8 / 5 if row["reach"] == 0 else 14 / 9)
    assert seen[f"{dtype} table"].count("\n") == 2 + len(cases)


def test_adapters_add_no_collective_as_wide_as_the_base_s(seen):
    check_layer(seen, "quick", "float32")


@pytest.mark.slow
def test_the_table_of_every_rank():
    seen = run_worker("all")
    for dtype in PARTS["all"][0]:
        check_layer(seen, "all", dtype)


def test_the_split_pool_is_updated_in_place(seen):
    facts = seen["in_place"]
    pool = facts["pool"]
    assert pool >= 2**27
    for name in ("layers", "write_page"):
        assert facts[name]["aliased"] >= pool
    assert facts["insert"]["aliased"] >= facts["rows"]
    for name in ("layers", "write_page", "insert"):
        assert facts[name]["temporaries"] < pool / 20, name


def test_a_page_comes_as_slices(seen):
    """Each device is handed its slice of the page, and none asks another for anything."""
    facts = seen["in_place"]
    assert facts["write_page"]["arguments"] == facts["pool"] + facts["page"] + 4
    assert facts["write_page"]["collectives"] == facts["insert"]["collectives"] == 0


def test_planned_exchanges_are_those_of_the_compiled_step(seen):
    facts = seen["in_place"]
    compiled = Counter()
    for name, runs, collectives in facts["step"]:
        for collective in collectives:
            if name == "layers":
                compiled[collective["nbytes"]] += runs
    planned = Counter()
    for exchange in facts["planned"]:
        planned[exchange["nbytes"]] += exchange["count"]
    assert compiled == planned
