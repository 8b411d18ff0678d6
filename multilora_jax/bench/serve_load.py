"""The load of `bench serve`: prompts, who asks for which adapter, and when each request is due (host only)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.tokenizer import Tokenizer

ASSIGNMENTS = ("random", "round-robin")
DISTRIBUTIONS = ("uniform", "distinct", "skewed")

_TEXT = (
    "the of and to in is was for that on with as are this be at by from have not or an had they you were all his "
    "one we can her there said which do their time if will how about up out many then them these so some would make "
    "like into him has two more write go see number no way could people my than first water been call who its now "
    "find long down day did get come made may part"
)
_WORDS = _TEXT.split()
"""One token each in the vocabulary of most models."""


@dataclass(frozen=True)
class Item:
    """One request as the load has it.

    Attributes:
        prompt: text, token ids, or a chat's messages.
        max_tokens: tokens of its answer at most.
        model: the model name that it asks for, None where the load does not say.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    max_tokens: int
    model: str | None = None

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str) and isinstance(self.prompt[0], dict)


def random_items(
    num: int, input_len: int, output_len: int, seed: int, tokenizer: Tokenizer | None, *, as_text: bool
) -> list[Item]:
    """Requests of random content.

    Args:
        num: how many.
        input_len, output_len: tokens of each prompt and of each answer.
        seed: of the random choice.
        tokenizer: of the model that is asked, which makes prompts of exactly so many tokens; None for texts of so many
            common words, which is about as many.
        as_text: texts rather than token ids; of another number of tokens once they are tokenized again.
    """
    rng = np.random.default_rng(seed)
    if tokenizer is None:
        words = rng.integers(len(_WORDS), size=(num, input_len))
        return [Item(" ".join(_WORDS[i] for i in row), output_len) for row in words]
    usual = np.setdiff1d(np.arange(tokenizer.vocab_size), np.asarray(sorted(tokenizer.special_ids), int))
    rows = rng.choice(usual, size=(num, input_len)).tolist()
    return [Item(tokenizer.decode(row) if as_text else row, output_len) for row in rows]


def open_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model given as in the configuration; of a folder no weights are needed.

    Raises:
        ConfigError, NotFoundError: there is no such model, or it has no tokenizer.
    """
    folder = Path(model).expanduser()
    tokenizer = Tokenizer.from_folder(folder) if folder.is_dir() else open_checkpoint(model).load_tokenizer()
    if tokenizer is None:
        raise ConfigError(f"tokenizer: {model!r} has none", reason="bad_value", param="tokenizer")
    return tokenizer


def read_items(path: str, num: int | None, output_len: int) -> list[Item]:
    """Requests of a JSONL file, from its start again where it has too few.

    Args:
        path: of lines {"prompt": text or token ids} or {"messages": [...]}, each with "max_tokens" (or "output_tokens")
            and "model" where it wants its own.
        num: how many; None for one of each line.
        output_len: max_tokens of lines that do not say.

    Raises:
        ConfigError: the file cannot be read, or a line of it is none of these, named by its number.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"cannot read {path!r}: {error}") from None
    items = [_item(line, f"{path}:{n}", output_len) for n, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise _bad(f"{path!r} has no lines")
    return [items[i % len(items)] for i in range(len(items) if num is None else num)]


def _item(line: str, where: str, output_len: int) -> Item:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise _bad(f"{where}: no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise _bad(f"{where}: must be an object")
    prompt = entry.get("messages", entry.get("prompt"))
    kind = dict if "messages" in entry else int
    if not (isinstance(prompt, str) and "messages" not in entry) and not (
        isinstance(prompt, list) and prompt and all(type(part) is kind for part in prompt)
    ):
        raise _bad(f'{where}: must have "prompt" (text or token ids) or "messages" (a list of objects)')
    max_tokens = entry.get("max_tokens", entry.get("output_tokens", output_len))
    if type(max_tokens) is not int or max_tokens < 1:
        raise _bad(f"{where}: max_tokens must be an integer of at least 1, got {max_tokens!r}")
    model = entry.get("model")
    if not isinstance(model, str | None):
        raise _bad(f"{where}: model must be a name, got {model!r}")
    return Item(prompt, max_tokens, model)


def _bad(what: str) -> ConfigError:
    return ConfigError(f"dataset_path: {what}", reason="bad_dataset", param="dataset_path")


def assign_models(names: Sequence[str], num: int, how: str, alpha: float, seed: int) -> list[str]:
    """The model name of each of `num` requests.

    Args:
        names: adapters (or other models) to choose among, at least one.
        num: requests.
        how: "random" or "uniform": each as likely; "round-robin" or "distinct": in turn; "skewed": the k-th with a
            probability proportional to k^-alpha (Zipf).
        alpha: see above.
        seed: of the random choice.
    """
    if how in ("round-robin", "distinct"):
        return [names[i % len(names)] for i in range(num)]
    share = np.arange(1, len(names) + 1) ** -(alpha if how == "skewed" else 0.0)
    rng = np.random.default_rng([seed, 1])  # prompts are drawn from the seed itself
    return [str(names[i]) for i in rng.choice(len(names), size=num, p=share / share.sum())]


def arrival_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due: fixed before the first is sent.

    Args:
        num: requests.
        rate: requests per second; infinity for all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less is burstier, more is more
            even.
        seed: of the random choice.
    """
    if math.isinf(rate):
        return [0.0] * num
    gaps = np.random.default_rng([seed, 2]).gamma(burstiness, 1 / (rate * burstiness), size=num)
    gaps[0] = 0.0
    return np.cumsum(gaps).tolist()
