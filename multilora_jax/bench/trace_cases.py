"""What `bench trace` runs: cases of a trace, a policy and a pool, from flags (host only, no jax)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from absl import flags as absl_flags

from multilora_jax.adapters.make import read_integers
from multilora_jax.bench.trace_load import SETTINGS, TraceSpec
from multilora_jax.config import EngineConfig
from multilora_jax.engine.policies import POLICIES
from multilora_jax.errors import ConfigError

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ORACLE = "oracle"
"""Beside the configuration's policies: one that knows what no server can, as a measure for the others."""

POOLS = ("unified", "capped", "split")
POOL_FORMS = "unified, capped, split, capped:PERCENT% or split:PERCENT%"
SWEPT = ("rate", "cv", "alpha", "num_adapters", "duration", "flood")


class PoolCap(NamedTuple):
    """What AdapterCache.set_cap is given.

    Attributes:
        max_adapter_pages: most pages of adapters; None for no cap.
        split: whether they are set apart.
    """

    max_adapter_pages: int | None
    split: bool


@dataclass(frozen=True)
class Case:
    """What one row of the report is of.

    Attributes:
        value: of what is swept; None without a sweep.
        spec: of the trace.
        policy, pool: their names, the pool's perhaps with a percentage: "split:25%".
    """

    value: float | None
    spec: TraceSpec
    policy: str
    pool: str

    def spec_of(self, number: int) -> TraceSpec:
        """Of its trace of that number, from 0."""
        return dataclasses.replace(self.spec, seed=self.spec.seed + number)

    def cap(self, config: EngineConfig, num_pages: int) -> PoolCap:
        """Of its pool, which has so many pages without page 0: the percentage of them, else `max_adapter_pages`."""
        kind, _, percent = self.pool.partition(":")
        if kind == "unified":
            return PoolCap(None, False)
        pages = round(num_pages * int(percent[:-1]) / 100) if percent else config.max_adapter_pages
        return PoolCap(pages, kind == "split")

    def row(self, swept: str | None) -> dict[str, Any]:
        """Its part of a row."""
        return {"policy": self.policy, "pool": self.pool} | ({swept: self.value} if swept else {})


def define_flags(flag_values: absl_flags.FlagValues) -> None:
    """Defines the flags that say what is run."""
    f, spec = flag_values, TraceSpec()
    number, integer, words = absl_flags.DEFINE_float, absl_flags.DEFINE_integer, absl_flags.DEFINE_list
    absl_flags.DEFINE_enum("setting", "S2", tuple(SETTINGS), "S-LoRA's setting, which gives the ranks.", flag_values=f)
    words("ranks", None, "Ranks of the adapters in turn, instead of the setting's.", flag_values=f)
    integer("num_adapters", spec.num_adapters, "Adapters.", lower_bound=1, flag_values=f)
    number("alpha", spec.alpha, "Of the power law: the first k of n adapters get (k/n)^alpha of the requests; 1 is "
           "uniform.", flag_values=f)  # fmt: skip
    number("rate", spec.rate, "Requests per second.", flag_values=f)
    number("cv", spec.cv, "Coefficient of variation of the gaps between arrivals; 1 is a Poisson process.",
           flag_values=f)  # fmt: skip
    number("duration", spec.duration_s, "Seconds for which requests come.", flag_values=f)
    words("input_range", list(map(str, spec.input_range)), "Prompts have from LOW to below HIGH tokens.", flag_values=f)
    words("output_range", list(map(str, spec.output_range)), "Answers have from LOW to below HIGH tokens.",
          flag_values=f)  # fmt: skip
    number("flood", spec.flood, "Requests per second of one adapter more; what they do to the others is told where "
           "there is a case without: --sweep flood=0,4.", flag_values=f)  # fmt: skip
    words("flood_range", None, "Prompts of the flood have from LOW to below HIGH tokens, by default as the others'.",
          flag_values=f)  # fmt: skip
    integer("trace_seed", spec.seed, "Seed of the trace.", lower_bound=0, flag_values=f)
    integer("seeds", 1, "Traces of each case, of this seed and those after it: one draw of a short trace says little. "
            "Figures are medians over them; differences of attainment between policies are taken within a trace.",
            lower_bound=1, flag_values=f)  # fmt: skip
    words("policy", ["fcfs"], f"Policies: {', '.join(POLICIES)}; with --dummy also {ORACLE}, which knows "
          "what no server can.", flag_values=f)  # fmt: skip
    words("pool", ["unified"], f"Kinds of pool: {POOL_FORMS}. PERCENT of the pool's pages are for adapters, by default "
          "--max-adapter-pages.", flag_values=f)  # fmt: skip
    absl_flags.DEFINE_string("sweep", None, f"NAME=VALUE,VALUE... of {', '.join(SWEPT)}: a case for each value.",
                             flag_values=f)  # fmt: skip


def cases_of(f: absl_flags.FlagValues) -> tuple[str | None, list[Case]]:
    """What is swept, and all cases: for each value of it, each policy with each pool.

    Raises:
        ConfigError: a flag asks for what there is not.
    """
    if f["scheduling_policy"].present:
        raise ConfigError("scheduling_policy is set by this command: give --policy", reason="conflicting_keys",
                          param="scheduling_policy")  # fmt: skip
    policies = _choice("policy", f.policy, (*POLICIES, ORACLE) if f.dummy else tuple(POLICIES))
    pools = _pools(f.pool)
    given = {
        "num_adapters": f.num_adapters, "alpha": f.alpha, "rate": f.rate, "cv": f.cv, "duration_s": f.duration,
        "input_range": _range("input_range", f.input_range), "output_range": _range("output_range", f.output_range),
        "seed": f.trace_seed, "flood": f.flood,
        "flood_range": None if f.flood_range is None else _range("flood_range", f.flood_range),
    }  # fmt: skip
    name, values = read_sweep(f.sweep)
    field = {"duration": "duration_s"}.get(name or "", name)
    specs = [(value, TraceSpec(**given | ({field: value} if field else {}))) for value in values]
    return name, [Case(value, spec, policy, pool) for value, spec in specs for policy in policies for pool in pools]


def read_sweep(text: str | None) -> tuple[str | None, list[Any]]:
    """Name and values of "rate=1,2,4"; None and one None without a sweep.

    Raises:
        ConfigError: a text of another form (`bad_value`).
    """
    if text is None:
        return None, [None]
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kind = int if name == "num_adapters" else float
    try:
        read = [kind(value) for value in values.split(",")]
    except ValueError:
        read = []
    if name not in SWEPT or not read:
        raise ConfigError(
            f"sweep must be NAME=VALUE,VALUE with a name of {', '.join(SWEPT)}, such as rate=1,2,4, got {text!r}",
            reason="bad_value", param="sweep",
        )  # fmt: skip
    return name, list(dict.fromkeys(read))


def notes_of(settings: dict[str, Any], config: EngineConfig, cases: Sequence[Case], num_pages: int) -> list[str]:
    """What must be known to read the figures: how the workload was scaled, and who may have what of the pool.

    Args:
        settings: of the report.
        config: as for Case.cap.
        cases: what was run.
        num_pages: of the pool, without page 0.
    """
    trace = {k: f"{v:g}" if isinstance(v, float) else v for k, v in settings["trace"].items()}
    swept = settings["sweep"]
    if swept:
        trace["duration_s" if swept == "duration" else swept] = "as swept"
    (low, high), (first, last) = settings["trace"]["input_range"], settings["trace"]["output_range"]
    notes = [
        f"{settings['setting']}: {trace['num_adapters']} adapters of rank {', '.join(map(str, settings['ranks']))} in "
        f"turn, alpha {trace['alpha']}, rate {trace['rate']}, cv {trace['cv']}, duration {trace['duration_s']} s; "
        f"prompts of {low} to {high - 1} tokens, answers of {first} to {last - 1} (S-LoRA: 8 to 511 each); objective "
        f"{settings['first_token_objective_s']:g} s for the first token (S-LoRA: 6)"
    ]
    if trace["flood"] != "0":
        low, high = settings["trace"]["flood_range"] or (low, high)
        notes.append(f"beside them one adapter more: flood {trace['flood']}, prompts of {low} to {high - 1} tokens")
    shares = {case.pool: case.cap(config, num_pages).max_adapter_pages for case in cases if case.pool != "unified"}
    if shares:
        told = ", ".join(f"{pool} {pages}" for pool, pages in shares.items())
        notes.append(f"pages for adapters of {num_pages} in the pool, where it is not unified: {told}")
    return notes


def check_pools(config: EngineConfig, cases: Sequence[Case]) -> None:
    """Raises ConfigError where a pool's size is missing."""
    if any(case.pool in POOLS[1:] for case in cases) and config.max_adapter_pages is None:
        raise ConfigError(
            "pool: capped and split need a percentage (split:25%) or --max-adapter-pages, the pages that adapters may "
            "have",
            reason="missing_key", param="max_adapter_pages",
        )  # fmt: skip


def _choice(name: str, words: Sequence[str], known: Sequence[str]) -> list[str]:
    """The words of a flag, each once, all of them known."""
    for word in words or [""]:
        if word not in known:
            raise ConfigError(f"{name} must be of {', '.join(known)}, got {word!r}", reason="bad_value", param=name)
    return list(dict.fromkeys(words))


def _pools(words: Sequence[str]) -> list[str]:
    """The words of --pool, each once, all of them of a known form."""
    for word in words or [""]:
        kind, colon, percent = word.partition(":")
        number = percent.removesuffix("%")
        sized = kind != "unified" and percent.endswith("%") and number.isdecimal() and 0 < int(number) < 100
        if kind not in POOLS or (colon and not sized):
            raise ConfigError(f"pool must be of {POOL_FORMS} (1 to 99), got {word!r}", reason="bad_value", param="pool")
    return list(dict.fromkeys(words))


def _range(name: str, words: Sequence[str]) -> tuple[int, int]:
    values = read_integers(name, words)
    if len(values) != 2:
        raise ConfigError(f"{name} must be two lengths LOW,HIGH, got {','.join(words)}", reason="bad_value", param=name)
    return values[0], values[1]
