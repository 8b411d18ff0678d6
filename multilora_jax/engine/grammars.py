"""What structured_outputs ask for, as automata over token ids (host only, no jax).

A grammar is compiled once for a tokenizer and shared by all requests that ask for the same; each request walks a copy.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from multilora_jax.errors import UserError
from multilora_jax.sampling_params import MAX_CONSTRAINT_CHARS, StructuredOutputsParams
from multilora_jax.tokenizer import Tokenizer

MAX_WHITESPACE = 40
"""Most characters of white space in one place of a JSON answer: a model that falls into repeating them gets out."""

_LIMITS: dict[str, Any] = {"max_grammar_size": 100_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""Beside the library's own bounds on the work of compiling (about a second) and of one mask (about 15 ms)."""

_STACK_BYTES = 256 << 20  # the compiler recurses as deep as rules refer to one another: one that long fits in this
_MAX_KEPT = {"grammar": 256, "vocabulary": 8}
_WEIGHT_CHARS = 4000  # of source; the states of a grammar take memory with its length, 32 MB for 90,000 characters

_stack_lock = threading.Lock()  # the size is one for the whole process

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Grammar:
    """A compiled grammar.

    Args:
        matcher: at its start.
        vocab_size: token ids below it are known.
        eos_token_ids: any of them ends an answer.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def start(self) -> GrammarWalk:
        """At its beginning, for one answer."""
        return GrammarWalk(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)


class GrammarWalk:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]):
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_words = -(-vocab_size // 32)

    def fill(self, mask_W: np.ndarray) -> None:
        """Sets the bits of the tokens that may come next.

        Args:
            mask_W: uint32[W], contiguous, zero; bit t % 32 of word t // 32 is that of token t.

        Raises:
            UserError: the grammar takes too much work here (`grammar_too_complex`).
        """
        words = mask_W[: self._num_words]
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def advance(self, token: int) -> None:
        """Takes the next token; one that ends the answer changes nothing. Raises UserError as `fill`."""
        if token not in self._eos_token_ids:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(
                f"the answer cannot go on within its grammar ({self._matcher.get_error()[:300]}): simplify it",
                reason="grammar_too_complex", param="structured_outputs",
            )  # fmt: skip


class Grammars:
    """Compiles grammars and keeps those used last; safe to use from several threads.

    A grammar stays findable for as long as somebody holds it, so that one compiled on a thread of its own is at hand
    when the request is queued.
    """

    def __init__(self) -> None:
        self._grammars: _Recent[Hashable, Grammar] = _Recent(_MAX_KEPT["grammar"])
        self._vocabularies: _Recent[Hashable, _Vocabulary] = _Recent(_MAX_KEPT["vocabulary"])

    def compile(
        self, asked: StructuredOutputsParams, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> Grammar:
        """The grammar of a request; at once where it was compiled before, else in up to seconds.

        Args:
            asked: what the text must be.
            tokenizer: of the request's adapter or of the base.
            vocab_size: token ids below it exist for the request.
            eos_token_ids: any of them ends the answer.

        Raises:
            UserError: `bad_grammar` with the compiler's reason, `grammar_too_long`, `no_eos_token`.
        """
        if not eos_token_ids:
            raise UserError(
                "structured_outputs need an end-of-sequence token, this model has none",
                reason="no_eos_token", param="structured_outputs",
            )  # fmt: skip
        source = _source(asked)
        text = (tokenizer, vocab_size, eos_token_ids)

        def build() -> Grammar:
            vocabulary = self._vocabularies.get(text, lambda: _Vocabulary(*text))
            matcher = _on_a_deep_stack(lambda: _compiled(vocabulary, source))
            if matcher.is_error():
                raise _refused(asked, matcher.get_error())
            return Grammar(matcher, vocab_size, eos_token_ids)

        return self._grammars.get((*text, source), build, 1 + len(source) // _WEIGHT_CHARS)


def _compiled(vocabulary: _Vocabulary, source: str) -> LLMatcher:
    """A matcher, or one with an error where the first token shows that the grammar cannot be followed.

    What is found here is refused at once and holds up nobody: a mask that fails can take seconds, on the engine's
    thread.
    """
    matcher = LLMatcher(vocabulary.native, source, log_level=0, limits=LLParserLimits(**_LIMITS))
    if matcher.is_error():
        return matcher
    trial = matcher.deep_copy()
    bits = np.unpackbits(np.frombuffer(trial.compute_bitmask(), np.uint8), bitorder="little")
    bits[vocabulary.special_token_ids] = 0
    for token in np.flatnonzero(bits)[:1].tolist():
        trial.consume_token(token)
    return trial if trial.is_error() else matcher


def _source(asked: StructuredOutputsParams) -> str:
    """In the compiler's own form. Raises UserError for text that is too long or not even JSON."""
    kind, value = asked.kind, getattr(asked, asked.kind)
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(asked, f"it cannot be written as JSON: {error}") from error
    if len(text) > MAX_CONSTRAINT_CHARS:
        raise UserError(
            f"structured_outputs: {kind} has {len(text)} characters, at most {MAX_CONSTRAINT_CHARS} are served",
            reason="grammar_too_long", param="structured_outputs",
        )  # fmt: skip
    try:
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        if kind == "choice":
            # One token of the grammar: as many alternatives of a rule would be too many to follow.
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, value)))
        if kind == "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(text))
        space: Any = {"whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_WHITESPACE}}}"}
        if asked.disable_any_whitespace:
            space = {"whitespace_flexible": False}
        schema = {"type": "object"} if kind == "json_object" else json.loads(text, parse_constant=_no_json)
        return LLMatcher.grammar_from_json_schema(schema, overrides=space)
    except (ValueError, RecursionError) as error:
        raise _refused(asked, str(error)) from error
    except Exception as error:  # the converter of grammars raises bare Exception
        if kind != "grammar":
            raise
        raise _refused(asked, str(error)) from error


def _no_json(name: str) -> NoReturn:
    """Refuses what Python reads as JSON though it is none."""
    raise ValueError(f"{name} is no JSON")


def _quoted(text: str) -> str:
    """A string of the compiler's grammar language, which reads no pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False)


def _refused(asked: StructuredOutputsParams, why: str) -> UserError:
    if "NoExtensionBias" in why:
        why = "no text of this model's tokens satisfies it"
    return UserError(
        f"structured_outputs: this {asked.kind} cannot be followed: {_reason(why)[:500]}",
        reason="bad_grammar", param="structured_outputs",
    )  # fmt: skip


def _reason(why: str) -> str:
    """What the compiler says, in one line and without the text of the grammar that it made ("   1 | start: …")."""
    lines = [line for line in why.splitlines() if not re.match(r"\s*\d+ \|", line)]
    return " ".join(" ".join(lines).split())


class _Vocabulary:
    """The bytes of every token, as the detokenizer joins them; special tokens are no text.

    Attributes:
        native: the same as the compiler wants it.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]):
        special = tokenizer.special_ids | eos_token_ids
        self._tokenizer = tokenizer
        self.eos_token_id, *_ = eos = sorted(eos_token_ids)
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        for token in self.special_token_ids:
            # The library's mark of a special token, whose spelling no text reaches.
            self.tokens[token] = b"\xff" + (self.tokens[token] or b"<%d>" % token)
        this: Any = self
        self.native = LLTokenizer(this, n_vocab=vocab_size, eos_token=eos)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _on_a_deep_stack(call: Callable[[], V]) -> V:
    """The result of a call on a thread with room for deep recursion."""
    result: Future[V] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return result.result()


class _Recent(Generic[K, V]):
    """Values made once for a key: those asked for last are kept, and found for as long as anybody holds them.

    A key that is being made is waited for; others are not held up by it.

    Args:
        capacity: the weights of those kept add up to no more.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._kept: OrderedDict[K, Future[V]] = OrderedDict()
        self._weight: dict[K, int] = {}  # of those kept
        self._alive: weakref.WeakValueDictionary[K, V] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V], weight: int = 1) -> V:
        """The value of a key, made now if there is none. An error of `make` goes to all who wait and is not kept."""
        with self._lock:
            future = self._kept.get(key)
            mine = future is None
            if future is None:
                future = self._kept[key] = Future()
                alive = self._alive.get(key)
                if alive is not None:
                    mine = False
                    future.set_result(alive)
            self._kept.move_to_end(key)
            self._weight[key] = weight
            while sum(self._weight.values()) > self._capacity and len(self._kept) > 1:
                oldest, _ = self._kept.popitem(last=False)
                del self._weight[oldest]
        if mine:
            try:
                value = make()
            except BaseException as error:
                with self._lock:
                    if self._kept.get(key) is future:
                        del self._kept[key], self._weight[key]
                future.set_exception(error)
                raise
            with self._lock:
                self._alive[key] = value
            future.set_result(value)
        return future.result()
