"""`bench serve`: load on a server over HTTP, any that speaks OpenAI's routes, and what its clients see of it."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence

from absl import flags as absl_flags

from multilora_jax.bench.report import check_outputs, define_output_flags, write_outputs
from multilora_jax.bench.serve_client import Target, body_of, list_models, run_load
from multilora_jax.bench.serve_load import (
    ASSIGNMENTS,
    DISTRIBUTIONS,
    Item,
    arrival_times,
    assign_models,
    open_tokenizer,
    random_items,
    read_items,
)
from multilora_jax.bench.serve_report import lines_of, make_serve_report
from multilora_jax.errors import ConfigError, UserError

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = ""
LISTS = ("lora_modules", "lora_name", "goodput")
EXAMPLE = (
    "python -m multilora_jax.bench serve --port 8000 --lora-modules upper json stars --num-prompts 64 --request-rate 4 "
    "--goodput ttft:500 tpot:100"
)
ABOUT = """Sends streamed requests to a server and reports throughput, the time to the first token (TTFT), between
pieces of text (ITL), per token after the first (TPOT) and to the end (E2E), goodput, and how evenly adapters were
served (Jain's index of the speed that a request of each saw, on average: 1 is even).

With --request-rate the times of arrival are drawn before the start, and kept whatever the server does; latencies count
from them, also where --max-concurrency holds a request back. Without a rate all requests are due at once, and under
--max-concurrency latencies count from the sending. How late the client itself was is reported. vLLM's and SGLang's
tools count from the sending throughout.

Flags have the names of vLLM's `bench serve`; --lora-name, --lora-request-distribution and --lora-zipf-alpha are those
of SGLang's `bench_serving`. Failed requests are counted and shown. Needs httpx: pip install 'multilora_jax[bench]'"""

GOODPUT = ("ttft", "tpot", "e2el")
DEFAULT_NUM_PROMPTS = 100


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags."""
    f = flag_values
    text, integer, number = absl_flags.DEFINE_string, absl_flags.DEFINE_integer, absl_flags.DEFINE_float
    text("base_url", None, "Address of the server, instead of --host and --port.", flag_values=f)
    text("host", "127.0.0.1", "Host of the server.", flag_values=f)
    integer("port", 8000, "Port of the server.", lower_bound=1, upper_bound=65535, flag_values=f)
    text("endpoint", "/v1/completions", "Route; /v1/chat/completions for chats.", flag_values=f)
    text("api_key", None, "Bearer token; by default that of the environment's OPENAI_API_KEY, if any.", flag_values=f)
    text("model", None, "Model of requests without an adapter; by default the first that the server lists.",
         flag_values=f)  # fmt: skip
    absl_flags.DEFINE_enum("dataset_name", "random", ("random", "custom"),
                           "Random prompts, or those of --dataset-path.", flag_values=f)  # fmt: skip
    text("dataset_path", None, 'JSONL file of {"prompt": ...} or {"messages": [...]}, with "max_tokens" and "model" '
         "where a line wants its own.", flag_values=f)  # fmt: skip
    text("tokenizer", None, "Model whose tokenizer makes random prompts of exact length; by default they are texts of "
         "so many common words.", flag_values=f)  # fmt: skip
    integer("num_prompts", None, f"Requests; by default {DEFAULT_NUM_PROMPTS}, or one for each line of a file.",
            lower_bound=1, flag_values=f)  # fmt: skip
    integer("random_input_len", 128, "Tokens of each random prompt.", lower_bound=1, flag_values=f)
    integer("random_output_len", 64, "Most tokens of each answer.", lower_bound=1, flag_values=f)
    absl_flags.DEFINE_boolean("ignore_eos", False, "Ask for answers of full length.", flag_values=f)
    number("request_rate", math.inf, "Requests per second; inf for all at once.", lower_bound=0, flag_values=f)
    number("burstiness", 1.0, "Of the gaps between arrivals: 1 is a Poisson process, less is burstier, more is more "
           "even.", lower_bound=0, flag_values=f)  # fmt: skip
    integer("max_concurrency", None, "Most requests under way.", lower_bound=1, flag_values=f)
    absl_flags.DEFINE_multi_string("lora_modules", None, "Adapters to choose among, by the server's names",
                                   flag_values=f)  # fmt: skip
    absl_flags.DEFINE_enum("lora_assignment", None, ASSIGNMENTS, "Which adapter a request asks for; random by default.",
                           flag_values=f)  # fmt: skip
    absl_flags.DEFINE_multi_string("lora_name", None, "The same as --lora-modules", flag_values=f)
    absl_flags.DEFINE_enum("lora_request_distribution", None, DISTRIBUTIONS, "The same as --lora-assignment: uniform "
                           "is random, distinct is in turn, skewed is Zipf's law.", flag_values=f)  # fmt: skip
    number("lora_zipf_alpha", 1.5, "Exponent of skewed: the k-th adapter gets a share proportional to k^-alpha.",
           lower_bound=0, flag_values=f)  # fmt: skip
    absl_flags.DEFINE_multi_string("goodput", None, "Limits in milliseconds, ttft:MS tpot:MS e2el:MS: goodput counts "
                                   "the requests that keep them all", flag_values=f)  # fmt: skip
    integer("num_warmups", 1, "Requests before the start, which are not counted.", lower_bound=0, flag_values=f)
    number("timeout_s", 600.0, "Longest silence of the server before a request counts as failed.", lower_bound=0.001,
           flag_values=f)  # fmt: skip
    integer("seed", 0, "Seed of prompts, adapters and arrivals.", lower_bound=0, flag_values=f)
    define_output_flags(f)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words. 1 where no request succeeded."""
    del words
    f = flag_values
    check_outputs(f)
    limits = read_goodput(f.goodput or [])
    names, how = _choice_of_adapters(f)
    if f.request_rate == 0 or f.burstiness == 0:
        raise ConfigError("request_rate and burstiness must be above 0", reason="bad_value", param="request_rate")
    base_url = (f.base_url or f"http://{f.host}:{f.port}").rstrip("/").removesuffix("/v1")
    target = Target(base_url, f.endpoint, f.api_key or os.environ.get("OPENAI_API_KEY"), f.timeout_s)
    items = _items(f, target)
    listed = list_models(target)
    models = names or [f.model or next(iter(listed), "")]
    if not models[0]:
        raise UserError(f"{base_url} lists no models: give --model", reason="missing_key", param="model")
    num, warmups = len(items) - f.num_warmups, f.num_warmups
    chosen = assign_models(models, len(items), how, f.lora_zipf_alpha, f.seed)
    chosen = [item.model or model for item, model in zip(items, chosen, strict=True)]
    bodies = [
        body_of(item, model, chat=target.is_chat, ignore_eos=f.ignore_eos)
        for item, model in zip(items, chosen, strict=True)
    ]
    due = arrival_times(num, f.request_rate, f.burstiness, f.seed)
    if warmups:
        asyncio.run(run_load(target, bodies[num:], chosen[num:], [0.0] * warmups))
    answers = asyncio.run(run_load(target, bodies[:num], chosen[:num], due, f.max_concurrency))
    settings = {
        "base_url": base_url, "endpoint": f.endpoint, "model": None if names else models[0], "adapters": names,
        "assignment": how, "lora_zipf_alpha": f.lora_zipf_alpha, "dataset_path": f.dataset_path,
        "tokenizer": f.tokenizer, "num_prompts": num, "random_input_len": f.random_input_len,
        "random_output_len": f.random_output_len, "ignore_eos": f.ignore_eos, "burstiness": f.burstiness,
        "request_rate": None if math.isinf(f.request_rate) else f.request_rate,
        "max_concurrency": f.max_concurrency, "goodput": limits, "seed": f.seed,
    }  # fmt: skip
    report = make_serve_report(settings, answers)
    print("\n".join(lines_of(report)))
    write_outputs(f, report)
    return 0 if report["totals"]["completed"] else 1


def read_goodput(words: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds by name, from "ttft:500" and the like.

    Raises:
        ConfigError: a word of another form (`bad_value`).
    """
    limits = {}
    for word in words:
        name, colon, value = word.partition(":")
        try:
            limit = float(value) if colon and name in GOODPUT else math.nan
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise ConfigError(
                f"goodput must be pairs such as ttft:500 of {', '.join(GOODPUT)} and milliseconds, got {word!r}",
                reason="bad_value", param="goodput",
            )  # fmt: skip
        limits[name] = limit
    return limits


def _choice_of_adapters(f: absl_flags.FlagValues) -> tuple[list[str], str]:
    """The names to choose among, empty for the model alone, and how."""
    for one, other in (("lora_modules", "lora_name"), ("lora_assignment", "lora_request_distribution")):
        if f[one].value and f[other].value:
            raise ConfigError(
                f"{one} and {other} say the same thing: give one of them", reason="conflicting_keys", param=other
            )
    words = f.lora_modules or f.lora_name or []
    names = [name for word in words for name in word.split(",") if name]
    return list(dict.fromkeys(names)), f.lora_assignment or f.lora_request_distribution or "random"


def _items(f: absl_flags.FlagValues, target: Target) -> list[Item]:
    """Those of the run, then those of the warm-up, which are others as far as there are any."""
    if f.dataset_path is not None:
        items = read_items(f.dataset_path, f.num_prompts, f.random_output_len)
        return items + [items[i % len(items)] for i in range(f.num_warmups)]
    if f.dataset_name == "custom":
        raise ConfigError("dataset_name custom needs --dataset-path", reason="missing_key", param="dataset_path")
    tokenizer = None if f.tokenizer is None else open_tokenizer(f.tokenizer)
    num = (f.num_prompts or DEFAULT_NUM_PROMPTS) + f.num_warmups
    lengths = (f.random_input_len, f.random_output_len)
    return random_items(num, *lengths, f.seed, tokenizer, as_text=target.is_chat)
