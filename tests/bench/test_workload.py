"""Commands from a dataclass of options: flags, defaults, and what is told before anything is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from absl import flags as absl_flags

from multilora_jax.bench.report import make_report
from multilora_jax.bench.workload import command, option
from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError


@dataclass(frozen=True)
class Work:
    count: int = option(3, "Of something.", 2)
    heat: float = option(0.5, "Of something else.", 0)
    kinds: tuple[str, ...] = option(("a", "b"), "Of a third thing.")
    twice: bool = option(default=False, doc="Once more.")


@pytest.fixture
def made() -> tuple[Any, list[tuple[EngineConfig, Work]]]:
    """A command, and what it measured."""
    measured = []

    def measure(config: EngineConfig, work: Work) -> dict[str, Any]:
        measured.append((config, work))
        return make_report("prefix", {}, [{"request": "first"}])

    define_flags, main = command(Work, measure, lambda report: f"shown: {report['rows']}", num_seqs=5)
    return SimpleNamespace(define_flags=define_flags, main=main), measured


def test_options_are_flags_with_their_defaults(made, run_tiny, tmp_path, capsys):
    program, measured = made
    out = tmp_path / "out.json"
    assert run_tiny(program, "--json", str(out)) == 0
    assert capsys.readouterr().out == "shown: [{'request': 'first'}]\n"
    assert json.loads(out.read_text())["rows"] == [{"request": "first"}]
    assert run_tiny(program, "--count 2 --heat 0 --kinds b,c,a --twice --max-num-seqs 7") == 0
    assert [work for _, work in measured] == [Work(3, 0.5, ("a", "b"), False), Work(2, 0.0, ("b", "c", "a"), True)]
    assert [config.max_num_seqs for config, _ in measured] == [5, 7]


def test_files_that_cannot_be_written_and_bad_values_are_told_first(made, run_tiny, tmp_path):
    program, measured = made
    for name, path in (("json", tmp_path / "none" / "out.json"), ("plot", tmp_path / "out.txt")):
        with pytest.raises(ConfigError, match=f"{name}: "):
            run_tiny(program, f"--{name}", str(path))
    for words in ("--count 1", "--heat -1"):
        with pytest.raises(absl_flags.IllegalFlagValueError):
            run_tiny(program, words)
    assert not measured
