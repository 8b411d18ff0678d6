"""Requests for several continuations: one sequence each, which share the prompt's pages (host only, no jax).

The first sequence, the leader, computes the prompt; the others wait until it has, then take its full pages from the
prefix cache and compute the rest of the prompt, less than a page or one, themselves. With the prefix cache switched off
the sequences of one request still share pages, under a key that no other request has, and the pages go with the
request. Continuation i draws its tokens like a request of its own with the seed + i (modulo 2**64).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.errors import UserError
from multilora_jax.memory.prefix_cache import PrefixChain, prefix_root
from multilora_jax.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, Sequence


class Family:
    """The sequences of one request, and what each has given so far.

    Args:
        request_id: as its caller named it.
        sequences: in the order of their index, the leader first.
    """

    def __init__(self, request_id: str, sequences: list[Sequence]):
        self.request_id = request_id
        self.sequences = sequences
        self._completions = [CompletionOutput(seq.index, "", []) for seq in sequences]
        self._leader_metrics: RequestMetrics | None = None
        self._newest: RequestOutput | None = None
        self._error: Exception | None = None

    def take(self, output: RequestOutput) -> None:
        """Notes the output of one of the sequences."""
        [completion] = output.outputs
        self._completions[completion.index] = completion
        if completion.index == 0:
            self._leader_metrics = output.metrics
        self._error = self._error or output.error
        before, self._newest = self._newest, output
        if before is not None:
            output.prompt_logprobs = output.prompt_logprobs or before.prompt_logprobs

    def output(self) -> RequestOutput:
        """The request as it stands; finished with its last sequence, or with the first that failed."""
        newest = self._newest
        assert newest is not None
        if self._error is not None:
            self._completions = [
                c if c.finish_reason else replace(c, finish_reason=FinishReason.ERROR.value) for c in self._completions
            ]
        finished = all(completion.finish_reason is not None for completion in self._completions)
        metrics = self._leader_metrics or newest.metrics
        if metrics is not None and newest.metrics is not None:
            metrics = replace(
                metrics,
                finished_time=newest.metrics.finished_time if finished else None,
                num_preemptions=sum(seq.num_preemptions for seq in self.sequences),
            )
        return replace(
            newest,
            request_id=self.request_id,
            outputs=list(self._completions),
            finished=finished,
            metrics=metrics,
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            error=self._error,
        )


class Fanout:
    """Makes the sequences of requests and puts their outputs together. Not thread-safe.

    Args:
        kv: of the engine's sequences.
        page_tokens: tokens of a page.
        caches: whether pages are shared between requests.

    Attributes:
        caches: as given.
    """

    def __init__(self, kv: KVManager, page_tokens: int, *, caches: bool):
        self._kv = kv
        self._page_tokens = page_tokens
        self.caches = caches
        self._families: dict[str, Family] = {}
        self._family_of: dict[str, Family] = {}
        self._roots = itertools.count()

    def sequences(self, first: Sequence, salt: str | None, live: Container[str]) -> list[Sequence]:
        """The sequences of a request in the order of their index: `first` alone, or its n continuations.

        Args:
            first: as if it were the only one; its id is the request's.
            salt: the request's cache_salt.
            live: ids of the live sequences.

        Raises:
            UserError: the id is in use (`duplicate_request_id`).
        """
        params, size, max_pages = first.params, self._page_tokens, None
        ids = [first.request_id, *(_child_id(first, i) for i in range(params.n if params.n > 1 else 0))]
        if first.request_id in self._families or any(request_id in live for request_id in ids):
            raise UserError(
                f"request id {first.request_id!r} is in use by a live request: choose another",
                reason="duplicate_request_id", param="request_id",
            )  # fmt: skip
        if self.caches:
            digests = [adapter.digest for adapter in first.adapters]
            root = prefix_root(digests, first.adapter_scales, salt)
        elif params.n > 1:
            root, max_pages = next(self._roots).to_bytes(32, "little"), first.num_prompt_tokens // size
        else:
            return [first]
        # What is asked for each prompt token has to be computed for each.
        first.prefix = PrefixChain(root, size, params.prompt_logprobs is None, max_pages)
        if params.n == 1:
            return [first]
        child_params = replace(params, n=1, prompt_logprobs=None)
        others = [
            replace(
                first,
                request_id=ids[1 + index],
                token_ids=list(first.token_ids),
                page_ids=[],
                params=child_params,
                prefix=PrefixChain(root, size, True, max_pages),
                index=index,
                seed=(first.seed + index) % 2**64,
            )
            for index in range(1, params.n)
        ]
        first.request_id = ids[1]
        return [first, *others]

    def enter(self, request_id: str, sequences: list[Sequence]) -> None:
        """Notes a new request."""
        if len(sequences) > 1:
            family = self._families[request_id] = Family(request_id, sequences)
            self._family_of.update({seq.request_id: family for seq in sequences})

    def members(self, request_id: str) -> list[str]:
        """The ids of a request's sequences."""
        family = self._families.get(request_id)
        return [request_id] if family is None else [seq.request_id for seq in family.sequences]

    def leave(self, request_id: str) -> None:
        """Forgets a request that has ended, its sequences too."""
        family = self._families.pop(request_id, None)
        if family is None:
            return
        for seq in family.sequences:
            del self._family_of[seq.request_id]
        if not self.caches:
            self._kv.forget(family.sequences[0])

    def merge(self, outputs: list[RequestOutput], end: Callable[[str], Any]) -> list[RequestOutput]:
        """The outputs of a step's sequences as outputs of their requests, one for each.

        Args:
            end: called with the id of a request of several continuations that has ended; ends what is left of it.
        """
        if not self._families:
            return outputs
        merged: list[RequestOutput] = []
        changed: dict[Family, None] = {}
        for output in outputs:
            family = self._family_of.get(output.request_id)
            if family is None:
                merged.append(output)
            else:
                family.take(output)
                changed[family] = None
        for family in changed:
            merged.append(family.output())
            if merged[-1].finished:
                end(family.request_id)
        return merged


def _child_id(first: Sequence, index: int) -> str:
    return f"{first.request_id} ({index + 1} of {first.params.n})"
