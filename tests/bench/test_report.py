"""The one form of every benchmark's output."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from multilora_jax import __version__
from multilora_jax.bench import report
from multilora_jax.errors import ConfigError


def test_json_has_the_one_form(tmp_path):
    rows = [{"mix": "base", "ratio_to_base": None, "tokens_per_second": 1.5}]
    path = tmp_path / "out.json"
    report.write_json(str(path), report.make_report("throughput", {"model": "m"}, rows))
    read = json.loads(path.read_text(encoding="utf-8"))
    assert list(read) == ["command", "config", "versions", "rows"]
    assert (read["command"], read["config"], read["rows"]) == ("throughput", {"model": "m"}, rows)
    versions = read["versions"]
    assert versions["multilora_jax"] == __version__
    assert versions["numpy"] == np.__version__
    for name in ("python", "jax", "jaxlib", "flax", "platform", "cpu_model"):
        assert isinstance(versions[name], str)
        assert versions[name]
    assert 1 <= versions["cpu_count"] <= (os.cpu_count() or 1)


def test_no_number_is_no_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write_json(str(tmp_path / "out.json"), report.make_report("x", {}, [{"a": float("nan")}]))
    assert not (tmp_path / "out.json").exists()


def test_unwritable_file_is_told_at_once(tmp_path):
    report.check_writable(str(tmp_path / "out.json"))
    for path in (tmp_path, tmp_path / "missing" / "out.json"):
        with pytest.raises(ConfigError, match="cannot write") as caught:
            report.check_writable(str(path))
        assert caught.value.param == "json"


def test_table_aligns():
    rows = [{"mix": "base", "speed": 1234.56, "ratio": None}, {"mix": "distinct", "speed": 7.0, "ratio": 0.5}]
    assert report.table(rows, {"mix": "", "speed": ".1f", "ratio": ".3f"}) == (
        "mix        speed  ratio\n"
        "base      1234.6      -\n"
        "distinct     7.0  0.500"
    )  # fmt: skip
