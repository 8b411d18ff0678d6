"""OpenTelemetry spans of requests, where they are asked for and the package is there."""

from __future__ import annotations

import logging
import time
from typing import Any

from multilora_jax.errors import ConfigError
from multilora_jax.server.call import Call
from multilora_jax.server.request_log import line_of

log = logging.getLogger(__name__)

SERVICE = "multilora_jax"
NOT_INSTALLED = (
    "otlp_endpoint asks for traces, which need OpenTelemetry: install the extra (pip install 'multilora_jax[otel]'), "
    "or leave the key out"
)


class Tracing:
    """A span for each request with work for the engine, and in it one each for waiting, prefill and decoding.

    A request that carries a W3C `traceparent` becomes part of the caller's trace. Attributes are those of the log line,
    so neither text nor keys; spans are sent in batches by a thread of their own.

    Args:
        endpoint: see otlp_endpoint.
        exporter: in place of the one that sends to the endpoint.

    Raises:
        ConfigError: OpenTelemetry is not installed (`missing_extra`).
    """

    def __init__(self, endpoint: str, exporter: Any = None):
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(NOT_INSTALLED, reason="missing_extra", param="otlp_endpoint") from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer(SERVICE)
        self._trace = trace
        self._extract = propagate.extract

    def __call__(self, call: Call) -> None:
        """Records the spans of a request that has ended."""
        if not call.submissions:
            return
        offset = time.time() - time.monotonic()

        def ns(seconds: float) -> int:
            return int((seconds + offset) * 1e9)

        kind = self._trace.SpanKind
        attributes = {f"multilora.{name}": value for name, value in line_of(call).items()}
        parent = self._extract({"traceparent": call.traceparent} if call.traceparent else {})
        span = self._tracer.start_span(
            f"{call.method} {call.path}", parent, kind.SERVER, attributes, start_time=ns(call.started)
        )
        if call.status is None or call.status >= 500 or call.error is not None:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, call.error or "no answer"))
        inside = self._trace.set_span_in_context(span)
        for submission in call.submissions:
            times = submission.times
            if times is None:
                continue
            marks = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time]
            for name, start, end in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
                if start is not None and end is not None:
                    self._tracer.start_span(name, inside, start_time=ns(start)).end(ns(end))
        span.end(ns(time.monotonic()))

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()
