"""The pictures of reports: every command has one, of every kind, and what cannot be drawn is refused early."""

from __future__ import annotations

import json
from typing import Any

import pytest
from absl import flags as absl_flags

from multilora_jax.bench import plot
from multilora_jax.bench.figure import draw
from multilora_jax.bench.serve_client import Answer
from multilora_jax.bench.serve_report import make_serve_report
from multilora_jax.errors import ConfigError, UserError

HEAD: dict[str, Any] = {"config": {"model": "m <1>", "dtype": "float32"}, "versions": {"cpu_model": "cpu"}}


def mix_row(mix: str, loop: float | None) -> dict[str, Any]:
    return {
        "mix": mix, "tokens_per_second": 300.0, "ratio_to_base": 0.8, "byte_floor_ratio": 0.9,
        "ratio_to_base_by_round": [0.7, 0.8, 0.9], "ratio_to_loop": loop, "loop_floor_ratio": loop and 5.0,
        "ratio_to_loop_by_round": loop and [3.0, 4.0],
    }  # fmt: skip


def statistics(mix: str, metric: str) -> dict[str, Any]:
    return {"mix": mix, "metric": metric, "mean": 1.0, "median": 2.0, "p95": 3.0, "p99": 4.0, "max": 5.0}


def phase(mix: str, step: str) -> dict[str, Any]:
    return {"mix": mix, "step": step, "plan_ms": 1.0, "inputs_ms": 2.0, "device_ms": 3.0, "output_ms": 4.0}


def count_row(count: int, ratio: float | None) -> dict[str, Any]:
    return {"num_adapters": count, "tokens_per_second": 300.0, "ttft_p50_s": 0.5, "ratio_to_one": ratio,
            "byte_floor_ratio": 0.9}  # fmt: skip


def cold_row(prefetch: str, gap: float | None) -> dict[str, Any]:
    return {"prefetch": prefetch, "cold_ttft_p50_s": 1.0, "warm_ttft_p50_s": 0.5, "gap_ratio": gap,
            "quiet_gap_ratio": gap}  # fmt: skip


def peer_row(engine: str, dtype: str, count: int, ratio: float) -> dict[str, Any]:
    return {"engine": engine, "dtype": dtype, "num_adapters": count, "tokens_per_second": 300.0,
            "ratio_to_ours": ratio}  # fmt: skip


METRICS = ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms")
ANSWERS = [
    Answer(model, 0.1 * i, 0.1 * i, 0.1 * i, [0.1 * i + 0.2, 0.1 * i + 0.3], 0.1 * i + 0.3, 5, 2)
    for i, model in enumerate(["a", "b", "b"])
] + [Answer("a", 0.4, 0.4, 0.4, ended=0.5, error="no")]

REPORTS: dict[str, dict[str, Any]] = {
    "throughput": {
        **HEAD, "command": "throughput",
        "rows": [mix_row("base", None), mix_row("identical", None)],
    },
    "loop": {**HEAD, "command": "throughput", "rows": [mix_row("distinct", 4.0), mix_row("loop", 1.0)]},
    "adapters": {**HEAD, "command": "adapters", "rows": [count_row(1, 1.0), count_row(100, 0.9)]},
    "adapters without one": {**HEAD, "command": "adapters", "rows": [count_row(10, None), count_row(100, None)]},
    "cold": {**HEAD, "command": "adapters --cold", "rows": [cold_row("on", 1.2), cold_row("off", None)]},
    "latency": {
        **HEAD, "command": "latency", "phases": [phase("base", "prefill"), phase("base", "decode")],
        "rows": [statistics(mix, metric) for mix in ("base", "distinct") for metric in METRICS],
    },
    "latency of one token": {
        **HEAD, "command": "latency", "phases": [],
        "rows": [{**statistics("base", metric), **({} if metric != "itl_ms" else {"mean": None})}
                 for metric in METRICS],
    },
    "serve": make_serve_report({"request_rate": 1.0, "max_concurrency": None, "goodput": {"ttft": 150.0}}, ANSWERS),
    "serve of one model": make_serve_report(
        {"request_rate": None, "max_concurrency": 2, "goodput": {}}, ANSWERS[1:3]
    ),
    "peers": {
        **HEAD, "command": "peers",
        "rows": [peer_row("multilora_jax", "float32", 0, 1.0), peer_row("hf-mixed", "float32", 0, 0.8),
                 peer_row("multilora_jax", "float32", 8, 1.0), peer_row("hf-loop", "bfloat16", 8, 0.1)],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_every_command_has_a_picture(name, tmp_path):
    path = tmp_path / "out.png"
    draw(REPORTS[name], str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    panels = {"throughput": 2, "loop": 3, "adapters": 3, "adapters without one": 2, "cold": 2, "latency": 4,
              "latency of one token": 2, "serve": 3, "serve of one model": 2, "peers": 2}  # fmt: skip
    width = int.from_bytes(path.read_bytes()[16:20], "big")
    assert width == pytest.approx(panels[name] * 5.6 * 130, abs=2)


def test_a_page_shows_axes_and_floors(tmp_path):
    path = tmp_path / "out.html"
    draw(REPORTS["loop"], str(path))
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert "<title>throughput   m &lt;1&gt;   float32   cpu</title>" in page
    for words in ("new tokens per second", "speed / speed of the base", "floor by bytes read", "mix of adapters"):
        assert words in page  # matplotlib writes each text as a comment beside its outlines


def test_the_plot_command(tmp_path):
    source, out = tmp_path / "report.json", tmp_path / "out.svg"
    source.write_text(json.dumps(REPORTS["peers"]))
    assert plot.main([str(source), str(out)], absl_flags.FlagValues()) == 0
    assert "<svg" in out.read_text()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "give REPORT.json OUT, for example"),
        (["{report}", "{folder}/out.txt"], "must end in one of .png, .svg, .pdf, .html"),
        (["{report}", "/no/such/folder/out.png"], "plot: cannot write"),
        (["{folder}/none.json", "{folder}/out.png"], "plot: cannot read"),
        (["{list}", "{folder}/out.png"], "is no report"),
        (["{report}", "{folder}/out.png"], "no rows of a command among prefix, lookup, structured, quality, throughput,"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, words, match):
    (tmp_path / "report.json").write_text('{"command": "other", "rows": [1]}')
    (tmp_path / "list.json").write_text("[]")
    names = {"report": tmp_path / "report.json", "list": tmp_path / "list.json", "folder": tmp_path}
    with pytest.raises(UserError, match=match) as error:
        plot.main([word.format(**names) for word in words], absl_flags.FlagValues())
    assert isinstance(error.value, ConfigError) == bool(words)
    assert not list(tmp_path.glob("out.*"))
