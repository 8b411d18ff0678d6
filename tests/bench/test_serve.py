"""`bench serve` against a real server of ours and against broken ones: what is counted, what is said."""

from __future__ import annotations

import contextlib
import io
import json
import math
import socket
from collections.abc import Iterator

import pytest
from absl import flags as absl_flags
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from multilora_jax import flags
from multilora_jax.bench import extras, serve
from multilora_jax.bench.serve import read_goodput
from multilora_jax.bench.serve_client import Answer, since_of
from multilora_jax.bench.serve_report import lines_of, make_serve_report
from multilora_jax.errors import ConfigError, UnavailableError, UserError
from tests.server.fake_engine import GOLDEN, FakeEngine
from tests.server.harness import Server, listening

SETTINGS = {"request_rate": 2.0, "max_concurrency": None, "goodput": {}}


def bench(*words: str) -> tuple[int, str]:
    """Status, and what was printed. Not capsys: uvicorn's start closes the handlers of logging, and absl's would take
    along the stderr that capsys has put aside."""
    values = absl_flags.FlagValues()
    serve.define_flags(values)
    values(flags.normalise_argv(["bench", *words], serve.LISTS))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return serve.main([], values), out.getvalue()


@contextlib.contextmanager
def our_server() -> Iterator[str]:
    server = Server(FakeEngine(lora_modules={"upper": str(GOLDEN / "cases" / "all_linear")}))
    try:
        with listening(server.app) as url:
            yield url
    finally:
        server.close()


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_against_a_server_of_ours(endpoint, tmp_path):
    out = tmp_path / "out.json"
    with our_server() as url:
        words = f"--base-url {url}/v1 --endpoint {endpoint} --num-prompts 6 --random-input-len 4 --random-output-len 5"
        more = (
            "--lora-modules upper gone --lora-assignment round-robin --request-rate 200 --goodput ttft:60000 e2el:60000"
        )
        status, printed = bench(*words.split(), *more.split(), "--json", str(out))
    assert status == 0
    read = json.loads(out.read_text())
    assert [row["metric"] for row in read["rows"]] == ["ttft_ms", "itl_ms", "tpot_ms", "e2el_ms", "client_late_ms"]
    assert (read["totals"]["completed"], read["totals"]["failed"], read["totals"]["good"]) == (3, 3, 3)
    assert read["totals"]["output_tokens"] == 15
    assert read["totals"]["input_tokens"] > 0
    assert [request["model"] for request in read["requests"]] == ["upper", "gone"] * 3
    [(message, count)] = read["errors"].items()
    assert count == 3
    assert message.startswith("HTTP 404: ")
    assert "gone" in message
    done = read["requests"][0]
    assert 0 < done["ttft_ms"] <= done["e2el_ms"]
    assert done["output_tokens"] == 5
    assert {row["model"]: row["failed"] for row in read["adapters"]} == {"gone": 3, "upper": 0}
    assert read["jain"] == pytest.approx(0.5)  # one of two got everything
    for words in ("3 requests completed, 3 failed", "failed: 3 x HTTP 404", "Jain's index of fairness: 0.500"):
        assert words in printed


def test_the_first_model_that_the_server_lists_and_a_file(tmp_path):
    load = tmp_path / "load.jsonl"
    load.write_text('{"prompt": "hi", "max_tokens": 3}\n{"prompt": "ho", "model": "upper"}\n')
    with our_server() as url:
        port = url.rsplit(":", 1)[1]
        words = f"--port {port} --dataset-path {load} --random-output-len 2 --max-concurrency 1 --num-warmups 0"
        assert bench(*words.split(), "--json", str(tmp_path / "out.json"))[0] == 0
    read = json.loads((tmp_path / "out.json").read_text())
    assert [(r["model"], r["output_tokens"]) for r in read["requests"]] == [("base", 3), ("upper", 2)]
    assert read["requests"][1]["sent_s"] > read["requests"][0]["sent_s"]  # one after the other
    assert read["config"]["request_rate"] is None


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnavailableError, match=rf"no answer from http://127.0.0.1:{port}/v1/models .*--port"):
        bench("--port", str(port))
    with pytest.raises(UserError, match="'localhost:1' is no address such as"):
        bench("--base-url", "localhost:1")


def events(*values: object) -> StreamingResponse:
    lines = [f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n" for value in values]
    return StreamingResponse(iter(lines), media_type="text/event-stream")


def piece(text: str, reason: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


async def odd_completion(request) -> StreamingResponse | JSONResponse:
    """Breaks in a way that the model's name says."""
    model = (await request.json())["model"]
    return {
        "broken": lambda: events(piece("a")),
        "late": lambda: events(piece("a"), {"error": {"message": "engine died"}}, "[DONE]"),
        "garbage": lambda: events("{"),
        "busy": lambda: JSONResponse({"error": "too many"}, 429),
        "plain": lambda: events(piece("a"), piece("b"), piece("", "length"), "[DONE]"),
        "silent": lambda: events(piece("", "length"), {"choices": [], "usage": {"completion_tokens": 2}}, "[DONE]"),
    }[model]()


def test_failed_requests_are_counted_and_named(tmp_path):
    app = Starlette(routes=[Route("/v1/completions", odd_completion, methods=["POST"])])
    names = ["broken", "late", "garbage", "busy", "plain", "silent"]
    out = tmp_path / "out.json"
    with listening(app) as url:
        words = ["--base-url", url, "--lora-name", *names, "--lora-request-distribution", "distinct"]
        status, printed = bench(*words, "--num-prompts", "6", "--json", str(out))
        assert status == 0
        assert bench("--base-url", url, "--model", "busy", "--num-prompts", "2")[0] == 1
        with pytest.raises(UserError, match="lists no models: give --model"):
            bench("--base-url", url)
    read = json.loads(out.read_text())
    assert [request["error"] for request in read["requests"]] == [
        "the stream broke off", "in the stream: engine died", "an event that is no JSON: b'{'", "HTTP 429: too many",
        None, None,
    ]  # fmt: skip
    assert [request["output_tokens"] for request in read["requests"][4:]] == [2, 2]  # pieces, where nothing is counted
    assert "failed: 1 x HTTP 429: too many" in printed


def test_times_count_from_the_time_that_a_request_was_due():
    answer = Answer("m", 1.0, woke=1.5, sent=2.0, came=[3.0, 3.5], ended=3.6, output_tokens=3)
    assert since_of(answer, 4.0, None) == since_of(answer, 4.0, 8) == since_of(answer, math.inf, None) == 1.0
    assert since_of(answer, math.inf, 8) == 2.0
    assert answer.times_ms(1.0) == {"ttft_ms": 2000, "tpot_ms": 250, "e2el_ms": 2500, "itl_ms": [500]}


def test_a_client_that_is_late_says_so_and_goodput_counts_from_the_schedule():
    late = [Answer("m", float(i), woke=i + 0.5, sent=i + 0.5, came=[i + 0.6], ended=i + 0.6, output_tokens=1)
            for i in range(4)]  # fmt: skip
    report = make_serve_report({**SETTINGS, "goodput": {"ttft": 200.0}}, late)
    assert report["rows"][-1]["median"] == pytest.approx(500)
    assert report["rows"][0]["median"] == pytest.approx(600)  # though it came 100 ms after it was sent
    assert report["totals"]["good"] == 0
    assert any("the client itself was 500.0 ms late" in line for line in lines_of(report))
    prompt = [Answer("m", float(i), woke=i, sent=i, came=[i + 0.1], ended=i + 0.1, output_tokens=1) for i in range(4)]
    report = make_serve_report({**SETTINGS, "goodput": {"ttft": 200.0}}, prompt)
    assert report["totals"]["good"] == 4
    assert not any("late (p99)" in line for line in lines_of(report))


def test_without_any_answer_there_are_dashes():
    report = make_serve_report(SETTINGS, [Answer("m", 0.0, ended=1.0, error="no")])
    assert report["totals"]["completed"] == 0
    lines = "\n".join(lines_of(report)).splitlines()
    assert any(line.split()[:2] == ["ttft_ms", "-"] for line in lines)
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            ["--goodput", "ttft"],
            "goodput must be pairs such as ttft:500 of ttft, tpot, e2el and milliseconds, got 'ttft'",
        ),
        (["--goodput", "ttft:500", "itl:3"], "got 'itl:3'"),
        (["--goodput", "ttft:-1"], "got 'ttft:-1'"),
        (["--lora-modules", "a", "--lora-name", "b"], "lora_modules and lora_name say the same thing"),
        (["--lora-assignment", "random", "--lora-request-distribution", "skewed"], "say the same thing"),
        (["--request-rate", "0"], "request_rate and burstiness must be above 0"),
        (["--dataset-name", "custom"], "dataset_name custom needs --dataset-path"),
    ],
)
def test_bad_flags(words, match):
    with pytest.raises(ConfigError, match=match):
        bench(*words)


def test_several_limits():
    assert read_goodput(["ttft:500", "tpot:50.5", "e2el:1e4"]) == {"ttft": 500, "tpot": 50.5, "e2el": 10000}


def test_what_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"httpx is not installed: pip install 'multilora_jax\[bench\]'"):
        bench("--port", "1")
    with pytest.raises(ConfigError, match=r"matplotlib is not installed: pip install 'multilora_jax\[bench\]'"):
        bench("--plot", "x.png")
