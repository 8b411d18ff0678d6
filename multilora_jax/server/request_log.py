"""One log line for each request: who asked which adapter for how much, how long it took and how it ended.

Never what was asked or answered, and no key: an error is given by its reason, since messages quote what was sent.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from multilora_jax.config import EngineConfig
from multilora_jax.server.auth import METRICS_PATH, OPEN_PATHS
from multilora_jax.server.call import Call

log = logging.getLogger(__name__)

DIGEST_DIGITS = 12
MAX_PATH = 200
_PROBES = OPEN_PATHS | {METRICS_PATH}
_EXPECTED = frozenset({"starting", "draining"})
"""What a probe is there to find out, every few seconds: no fault."""


class RequestLog:
    """Writes the line of a request that has ended: at level info, warning for a fault of the server, debug for probes,
    those among them that a starting or a draining server answers with 503.

    Args:
        config: its `log_requests`.
    """

    def __init__(self, config: EngineConfig):
        self._on = config.log_requests

    def __call__(self, call: Call) -> None:
        """Writes the line."""
        if not self._on:
            return
        level = logging.DEBUG if call.path in _PROBES else logging.INFO
        if _failed(call) and not (call.path in _PROBES and call.error in _EXPECTED):
            level = logging.WARNING
        if log.isEnabledFor(level):
            log.log(level, "request", extra={"fields": line_of(call)})


def line_of(call: Call) -> dict[str, Any]:
    """The fields of a request's line; those that it has none of are left out.

    Times are seconds: `queue_s` until the first step, `ttft_s` until the first token, `total_s` until the answer's end,
    each from the request's arrival. Of several prompts the tokens are summed, and the longest wait and the first token
    are told.
    """
    fields: dict[str, Any] = {
        "request_id": call.request_id, "method": call.method, "path": call.path[:MAX_PATH],
        "status": 499 if call.gone else call.status or 500, "tenant": call.caller.tenant,
    }  # fmt: skip
    if call.submissions:
        fields |= _work(call)
    if call.error is not None:
        fields["error"] = call.error
    elif call.gone:
        fields["error"] = "client_gone"
    fields["total_s"] = round(time.monotonic() - call.started, 6)
    return fields


def _work(call: Call) -> dict[str, Any]:
    """What the engine did for a request."""
    names = dict.fromkeys(name for submission in call.submissions for name in submission.adapters)
    outputs = [submission.output for submission in call.submissions if submission.output is not None]
    digests = dict.fromkeys(digest for output in outputs for digest in output.adapter_digests)
    prompt, cached, generated = (sum(n) for n in zip(*(s.num_tokens for s in call.submissions), strict=True))
    times = [output.metrics for output in outputs if output.metrics is not None]
    queued = [t.first_scheduled_time - t.arrival_time for t in times if t.first_scheduled_time is not None]
    to_first = [t.first_token_time - t.arrival_time for t in times if t.first_token_time is not None]
    work: dict[str, Any] = {}
    if names:
        work["adapter"] = ",".join(names)
    if digests:
        work["digest"] = ",".join(digest[:DIGEST_DIGITS] for digest in digests)
    work |= {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": generated}
    if queued:
        work["queue_s"] = round(max(queued), 6)
    if to_first:
        work["ttft_s"] = round(min(to_first), 6)
    if call.finish_reasons:
        work["finish_reason"] = ",".join(call.finish_reasons)
    return work


def _failed(call: Call) -> bool:
    return not call.gone and (call.status is None or call.status >= 500)
