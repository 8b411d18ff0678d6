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


def prefix_row(request: str, ttft_s: float, found: int, aim: float | None = None) -> dict[str, Any]:
    return {"request": request, "ttft_s": ttft_s, "ratio_to_first": ttft_s / 1.4, "cached_tokens": found,
            "prompt_tokens": 528, "aim_ratio": aim, "ttft_s_by_round": [0.9 * ttft_s, ttft_s, 1.2 * ttft_s],
            "ratio_to_first_by_round": [0.9 * ttft_s / 1.4, ttft_s / 1.4, 1.2 * ttft_s / 1.4]}  # fmt: skip


def lookup_row(task: str, lookup: str, speed: float, decode: float | None, aim: float | None = None) -> dict[str, Any]:
    rounds = None if decode is None else [decode / 35, decode / 30]
    return {"task": task, "lookup": lookup, "tokens_per_second": speed, "ratio_to_plain": speed / 20,
            "decode_tokens_per_second": decode, "decode_ratio_to_plain": decode and decode / 30, "aim_ratio": aim,
            "ratio_to_plain_by_round": [speed / 21, speed / 19],
            "decode_ratio_to_plain_by_round": rounds}  # fmt: skip


def case_row(case: str, ms: float, neighbours: float | None = None) -> dict[str, Any]:
    whole = case == "structured"
    return {"case": case, "ms_per_step": ms, "ratio_to_plain": ms / 40, "neighbour_ratio": neighbours,
            "aim_ratio": 1.15 if whole else None, "ratio_to_plain_by_round": [ms / 41, ms / 39],
            "neighbour_ratio_by_round": neighbours and [0.99 * neighbours, 1.01 * neighbours],
            "parsed_share": 0.995 if whole else None, "checked_answers": 200 if whole else None,
            "parsed_by_schema": {"person": 1.0, "review": 1.0, "order": 0.985} if whole else None}  # fmt: skip


def weights_row(weights: str, adapter: str, worse: float, mib: float) -> dict[str, Any]:
    return {"weights": weights, "adapter": adapter, "perplexity": 28 * (1 + worse) + len(adapter) / 9,
            "perplexity_ratio": 1 + worse, "scored_tokens": 1016, "same_next_token": 1 - 20 * worse,
            "same_prefix": 32 * (1 - 100 * worse), "tokens_per_second": 100 * (1 + 100 * worse),
            "weight_mib": mib}  # fmt: skip


def quality_rows(*adapters: str) -> list[dict[str, Any]]:
    weights = (("float32", 0.0, 513), ("bfloat16", 0.0006, 257), ("int8", 0.0027, 129))
    return [weights_row(name, adapter, worse, mib) for adapter in adapters for name, worse, mib in weights]


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
    "prefix": {
        **HEAD, "command": "prefix",
        "rows": [prefix_row("first", 1.4, 0), prefix_row("second", 0.14, 512, 0.25),
                 prefix_row("other adapter", 1.5, 0), prefix_row("base", 1.2, 0), prefix_row("other salt", 1.4, 0)],
    },
    "lookup": {
        **HEAD, "command": "lookup",
        "rows": [lookup_row("extraction", "off", 20.0, 30.0), lookup_row("extraction", "8", 31.0, 62.0, 1.5),
                 lookup_row("prose", "off", 20.0, 30.0), lookup_row("prose", "8", 21.0, None)],
    },
    "structured": {
        **HEAD, "command": "structured",
        "rows": [case_row("plain", 40.0), case_row("structured", 43.5), case_row("half", 42.0, 1.02)],
    },
    "quality": {**HEAD, "command": "quality", "config": {"output_len": 32}, "rows": quality_rows("-", "upper")},
    "quality of float32": {
        **HEAD, "command": "quality", "config": {"output_len": 32}, "rows": quality_rows("-")[:1],
    },
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
              "latency of one token": 2, "serve": 3, "serve of one model": 2, "prefix": 2, "lookup": 2,
              "structured": 3, "quality": 4, "quality of float32": 3, "peers": 2}  # fmt: skip
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prefix", ["time to first token, ms", "512 of 528", "aim, at most", "single rounds"]),
        ("lookup", ["guessing up to 8 tokens", "decoding", "aim, at least", "speed / speed without lookup"]),
        ("structured", ["every other row", "time between two tokens of an answer, ms", "share of 200 answers", "98.5"]),
        ("quality", ["perplexity of 1,016 tokens", "+0.27 %", "most likely next token, adapter upper", "MiB"]),
    ],
)
def test_the_features_pictures_say_what_they_show(name, words, tmp_path):
    path = tmp_path / "out.svg"
    draw(REPORTS[name], str(path))
    picture = path.read_text()
    assert [word for word in words if word not in picture] == []


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
        (
            ["{report}", "{folder}/out.png"],
            "no rows of a command among prefix, lookup, structured, quality, throughput,",
        ),
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
