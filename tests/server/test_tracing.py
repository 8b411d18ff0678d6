"""OpenTelemetry: spans of a request, sent by OTLP, and a clear error where the package is missing."""

from __future__ import annotations

import http.server
import sys
import threading

import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError
from multilora_jax.server.app import create_app
from multilora_jax.server.tracing import Tracing

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_request_is_a_span_with_its_phases(make_server):
    exporters = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    server, exporter = make_server(), exporters.InMemorySpanExporter()
    tracing = Tracing("http://unused", exporter)
    server.app.state.context.calls.add_observer(tracing)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "r1"}
    body = {"model": "adapter-a", "prompt": "secret words", "max_tokens": 3}
    await server.client.post("/v1/completions", json=body, headers=headers)
    await server.client.get("/v1/models")  # asks nothing of the engine
    await server.post("/v1/completions", {**body, "model": "nobody"})
    tracing.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/completions", "queue", "prefill", "decode"}
    whole = spans["POST /v1/completions"]
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    assert whole.attributes["multilora.adapter"] == "adapter-a"
    assert whole.attributes["multilora.completion_tokens"] == 3
    assert "secret" not in repr(whole.to_json())
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == whole.context.span_id
        assert whole.start_time <= spans[name].start_time <= spans[name].end_time <= whole.end_time
    assert spans["queue"].end_time == spans["prefill"].start_time


async def test_spans_are_sent_to_the_endpoint(make_server):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        server = make_server(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces")
        await server.complete(model="adapter-a")
        server.app.state.tracing.close()
        collector.shutdown()
        thread.join()
    [(path, body)] = got
    assert path == "/v1/traces"
    assert b"adapter-a" in body


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'multilora_jax\[otel\]'") as caught:
        create_app(None, EngineConfig(model="m", otlp_endpoint="http://localhost:4318/v1/traces"))
    assert (caught.value.reason, caught.value.param) == ("missing_extra", "otlp_endpoint")
