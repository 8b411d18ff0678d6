"""How the caller wants tokens chosen (host only; names, defaults and meaning follow vLLM's)."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace
from typing import Any

from multilora_jax.errors import UserError

MAX_LOGPROBS = 20
"""Most alternatives per position that one request may ask for."""
MAX_N = 128
"""Most continuations that one request may ask for."""
MAX_PROMPT_LOOKUP = 64
"""Most tokens of a step that may be guessed for one sequence."""
MAX_BIAS = 100.0
"""Values of logit_bias are clamped to this, both ways."""
MAX_EDITED_TOKENS = 1024
"""Most entries of logit_bias, bad_words and stop_token_ids together."""
MAX_STOPS = 256
"""Most stop strings of a request: each is looked for after every token, beside everybody's next step."""
MAX_STOP_CHARS = 1024
"""Longest stop string, in characters."""
MAX_BAD_WORD_CHARS = 16_384
"""Most characters of all bad_words together."""
MAX_CONSTRAINT_CHARS = 100_000
"""Longest JSON schema, regular expression, grammar or list of choices, in characters."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass
class StructuredOutputsParams:
    """What an answer's text must be: exactly one of the first five.

    Args:
        json: a JSON schema, as a mapping or as JSON text.
        regex: a regular expression in Rust's syntax that the whole answer matches.
        choice: texts, one of which is the answer.
        grammar: a context-free grammar, in llguidance's Lark syntax or as GBNF, whose start rule is `start` or `root`.
        json_object: True for any JSON object.
        disable_any_whitespace: JSON in one line without spaces; by default up to MAX_WHITESPACE
            (engine.grammars) characters of white space may stand wherever JSON allows some.

    Raises:
        UserError: none or several of them, or one of the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            self._fail(f"needs exactly one of {', '.join(_KINDS)}, not {', '.join(given) or 'none of them'}")
        if isinstance(self.choice, list | tuple):
            self.choice = list(self.choice)
        ok = {
            "json": isinstance(self.json, str | dict),
            "regex": isinstance(self.regex, str),
            "choice": isinstance(self.choice, list) and bool(self.choice) and all(
                isinstance(text, str) and text for text in self.choice
            ),
            "grammar": isinstance(self.grammar, str) and bool(self.grammar.strip()),
            "json_object": self.json_object is True,
        }  # fmt: skip
        what = {
            "json": "a JSON schema", "regex": "a string", "choice": "a list of non-empty strings",
            "grammar": "a grammar's text", "json_object": "true or false",
        }  # fmt: skip
        if not ok[given[0]]:
            self._fail(f"{given[0]} must be {what[given[0]]}, not {getattr(self, given[0])!r:.100}")
        if not isinstance(self.disable_any_whitespace, bool):
            self._fail(f"disable_any_whitespace must be true or false, not {self.disable_any_whitespace!r:.100}")

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @staticmethod
    def of(value: Any) -> StructuredOutputsParams:
        """The same from a mapping of the fields, as JSON has it. Raises UserError for an unknown field."""
        if isinstance(value, StructuredOutputsParams):
            return replace(value)  # its owner may change it, or has
        if not isinstance(value, dict):
            StructuredOutputsParams._fail(f"must be a mapping of fields, not {value!r:.100}")
        known = [f.name for f in fields(StructuredOutputsParams)]
        for name in value:
            if name not in known:
                StructuredOutputsParams._fail(f"has no field {str(name)[:100]!r}: the fields are {', '.join(known)}")
        return StructuredOutputsParams(**value)

    @staticmethod
    def _fail(what: str) -> None:
        raise UserError(f"structured_outputs {what}", reason="bad_sampling_params", param="structured_outputs")


@dataclass
class SamplingParams:
    """How to choose tokens and when to stop; vLLM's names and defaults.

    Logits are changed in this order: structured_outputs and allowed_token_ids, bad_words, min_tokens, logit_bias,
    repetition_penalty, frequency_penalty, presence_penalty, temperature, min_p, top_k, top_p. Log-probabilities are of
    the model's own distribution, before all of these.

    Args:
        presence_penalty, frequency_penalty: from -2 to 2; taken off the logit of a token that the answer holds
            already, once, and once per occurrence.
        repetition_penalty: above 0; divides the positive and multiplies the negative logits of tokens in prompt or
            answer.
        stop: strings that end the answer, at most 256 of at most 1024 characters.
        min_tokens: no end-of-sequence or stop token before the answer has so many tokens, and no stop string counts
            that is complete before.
        logit_bias: token id to what is added to its logit, clamped to [-100, 100].
        allowed_token_ids: nothing else is generated, also no end of sequence that is not listed.
        bad_words: texts that the answer's tokens never spell, with or without a space before them.
        structured_outputs: what the text must be, see StructuredOutputsParams (or a mapping of its fields). Where
            bad_words or min_tokens forbid all that it (or allowed_token_ids) leaves, they give way for that token.
        n: answers to the prompt, up to 128.
        prompt_lookup_tokens: most tokens of a step that are guessed from the text before (prompt lookup decoding),
            which makes quoting faster and changes no token; 0 for none, None for the engine's setting. Without effect
            on requests that change logits, see above, from bad_words to penalties.

    Raises:
        UserError: a value outside its range, named with the value, or values that contradict each other.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    prompt_lookup_tokens: int | None = None

    def __post_init__(self) -> None:
        self.n = self._integer("n", 1, MAX_N)
        if self.prompt_lookup_tokens is not None:
            self.prompt_lookup_tokens = self._integer("prompt_lookup_tokens", 0, MAX_PROMPT_LOOKUP)
        self.temperature = self._number("temperature", 0.0, math.inf, high_open=True)
        self.top_p = self._number("top_p", 0.0, 1.0, low_open=True)
        self.min_p = self._number("min_p", 0.0, 1.0)
        self.top_k = 0 if self.top_k == -1 else self._integer("top_k", 0)
        self.max_tokens = None if self.max_tokens is None else self._integer("max_tokens", 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and self._integer(name, 0) > MAX_LOGPROBS:
                self._fail(name, f"is at most {MAX_LOGPROBS}")
        if self.seed is not None:
            self.seed = self._integer("seed", -(2**63), 2**64 - 1)
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        elif isinstance(self.stop, list | tuple):
            self.stop = list(self.stop)
        else:
            self._fail("stop", "must be a non-empty string or a list of them")
        if not all(isinstance(s, str) and s for s in self.stop):
            self._fail("stop", "must be a non-empty string or a list of them")
        if len(self.stop) > MAX_STOPS or max(map(len, self.stop), default=0) > MAX_STOP_CHARS:
            self._fail("stop", f"may be at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters each")
        if self.stop and not self.detokenize:
            self._fail("stop", "needs detokenize=True")
        self.stop_token_ids = [] if self.stop_token_ids is None else self._token_ids("stop_token_ids")
        self._check_penalties()
        self._check_tokens()

    def _check_penalties(self) -> None:
        self.presence_penalty = self._number("presence_penalty", -2.0, 2.0)
        self.frequency_penalty = self._number("frequency_penalty", -2.0, 2.0)
        self.repetition_penalty = self._number("repetition_penalty", 0.0, math.inf, low_open=True, high_open=True)
        self.min_tokens = self._integer("min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            self._fail("min_tokens", f"is above max_tokens={self.max_tokens}")

    def _check_tokens(self) -> None:
        self._check_edited()
        if self.logit_bias is not None:
            self.logit_bias = self._bias()
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list(dict.fromkeys(self._token_ids("allowed_token_ids")))
            if not self.allowed_token_ids:
                self._fail("allowed_token_ids", "allows nothing: list at least one token id, or leave it out")
        if self.bad_words is not None:
            words: Any = self.bad_words
            if not isinstance(words, list | tuple) or not all(isinstance(w, str) and w.strip() for w in words):
                self._fail("bad_words", "must be a list of words that are not empty")
            self.bad_words = list(words)
            if sum(map(len, words)) > MAX_BAD_WORD_CHARS:
                self._fail("bad_words", f"has more than {MAX_BAD_WORD_CHARS} characters together")
            if any("\ud800" <= char <= "\udfff" for word in words for char in word):
                self._fail("bad_words", "holds half of a surrogate pair, which is no text")
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
            for name, default in (("allowed_token_ids", None), ("ignore_eos", False)):
                if getattr(self, name) != default:
                    raise UserError(
                        f"{name} contradicts structured_outputs, which decides what may follow and where the answer "
                        "ends: send one of them",
                        reason="conflicting_parameters", param=name,
                    )  # fmt: skip

    def _check_edited(self) -> None:
        """Before any of them is looked at: however many there are, that takes no time."""
        lists: tuple[Any, ...] = (self.logit_bias, self.bad_words, self.stop_token_ids)
        edited = sum(len(x) for x in lists if isinstance(x, dict | list | tuple))
        if edited > MAX_EDITED_TOKENS:
            name = "bad_words" if self.bad_words else "logit_bias" if self.logit_bias else "stop_token_ids"
            raise UserError(
                f"logit_bias, bad_words and stop_token_ids list {edited} tokens and words: at most {MAX_EDITED_TOKENS} "
                "together are served; allowed_token_ids may list any number",
                reason="bad_sampling_params", param=name,
            )  # fmt: skip

    def _bias(self) -> dict[int, float]:
        what = "must map token ids to numbers"
        if not isinstance(self.logit_bias, dict):
            self._fail("logit_bias", what)
        assert self.logit_bias is not None
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            is_number = isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdigit()
            token: Any = int(key) if is_number else key
            if not _is_token(token):
                self._fail("logit_bias", f"{what}: {key!r:.50} is no token id")
            if not isinstance(value, numbers.Real) or isinstance(value, bool) or value != value:
                self._fail("logit_bias", f"{what}: {value!r:.50} is no number")
            bias[int(token)] = float(min(max(value, -MAX_BIAS), MAX_BIAS))
        return bias

    def _token_ids(self, name: str) -> list[int]:
        ids = getattr(self, name)
        if isinstance(ids, list | tuple) and set(map(type, ids)) == {int} and min(ids) >= 0:
            return list(ids)  # the same as below, for a list of a whole vocabulary
        if not isinstance(ids, list | tuple) or not all(_is_token(t) for t in ids):
            self._fail(name, "must be a list of token ids")
        return [int(t) for t in ids]

    def _fail(self, name: str, what: str) -> None:
        raise UserError(f"{name}={getattr(self, name)!r:.200} {what}", reason="bad_sampling_params", param=name)

    def _number(self, name: str, low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> float:
        value = getattr(self, name)
        ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
        try:
            value = float(value) if ok else math.nan
        except OverflowError:
            value = math.inf
        ok = ok and (low < value if low_open else low <= value) and (value < high if high_open else value <= high)
        if not ok:
            left, right = "(" if low_open else "[", ")" if high_open else "]"
            self._fail(name, f"is outside {left}{low:g}, {high:g}{right}")
        return value

    def _integer(self, name: str, low: int, high: int | None = None) -> int:
        value = getattr(self, name)
        ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        number = int(value) if ok else 0
        if not ok or number < low or (high is not None and number > high):
            self._fail(name, f"must be an integer {f'of at least {low}' if high is None else f'from {low} to {high}'}")
        return number

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, as vLLM does for a temperature below 1e-5."""
        return self.temperature < 1e-5

    @property
    def edits_logits(self) -> bool:
        """Whether anything is asked for that changes logits before temperature."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
        return bool(
            penalties
            or self.min_tokens
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.structured_outputs is not None
        )


def _is_token(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0
