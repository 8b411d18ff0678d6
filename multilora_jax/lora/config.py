"""adapter_config.json as PEFT writes it: what changes the maths is read, what cannot is skipped, the rest is refused.

The scale of a module is `lora_alpha / r` (LoRA, section 4.1 of arXiv 2106.09685) or `lora_alpha / sqrt(r)` with
`use_rslora` (arXiv 2312.03732), where both numbers may be given per module by `rank_pattern` and `alpha_pattern`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from multilora_jax.errors import AdapterError
from multilora_jax.lora.tensor_names import PREFIX

DEFAULT_RANK = 8
"""PEFT's value of `r` where the file has none."""
DEFAULT_ALPHA = 8.0
"""PEFT's value of `lora_alpha` where the file has none."""

# Fields that say where the adapter comes from, how it was trained or started, or which modules were meant: none of
# them changes what a given file of weights computes.
_INERT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
_READ = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights",
    "use_dora", "lora_bias", "modules_to_save", "target_modules", "trainable_token_indices", "ensure_weight_tying",
})  # fmt: skip

UNSUPPORTED_FIELDS = {
    "modules_to_save": "fully trained modules other than embed_tokens, lm_head and norms are",
    "layer_replication": "replicated layers are",
    "fan_in_fan_out": "transposed weights are",
    "alora_invocation_tokens": "activated LoRA adapters are",
    "use_qalora": "QALoRA adapters are",
    "target_parameters": "adapters of bare parameters are",
    "init_lora_weights": "adapters that need a changed base are",
}
"""Features that are known and not served, each with how a message begins to say so."""

# Starts that leave the base as it is, so that the saved A and B are the whole adapter. The others (pissa, olora,
# corda, loftq, lora_ga) subtract something from the base's weights; PEFT's own conversion writes `true` here.
_PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica"})

# A pattern is a stranger's regular expression and Python's engine holds the interpreter while it backtracks.
_MAX_PATTERN_LENGTH, _MAX_QUANTIFIERS, _MAX_GROUPS = 1000, 4, 4


def unsupported(field: str, detail: str) -> AdapterError:
    """The error for a feature that is not served. `field` names it as PEFT does, `detail` says where it was seen."""
    what = UNSUPPORTED_FIELDS.get(field, "this setting is unknown here and could change the result; such adapters are")
    return AdapterError(
        f"{field}: {what} not supported ({detail}); the adapter is refused rather than served in part",
        reason="unsupported_adapter_feature", param=field,
    )  # fmt: skip


def contradiction(field: str, detail: str) -> AdapterError:
    """The error for a field that says one thing and weights that say another. `detail` says what each says."""
    return AdapterError(
        f"{field}: adapter_config.json and the weights contradict each other ({detail}); the adapter is refused rather "
        "than served in part",
        reason="contradictory_adapter", param=field,
    )  # fmt: skip


def _bad(field: str, message: str) -> AdapterError:
    return AdapterError(f"adapter_config.json: {field} {message}", reason="bad_adapter_config", param=field)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _rank(field: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(field, f"must be an integer of at least 1, got {_show(value)}")
    return value


def _alpha(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(field, f"must be a number, got {_show(value)}")
    # The scale is kept in float32, and a Python integer may even exceed a double.
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise _bad(field, f"must be a finite float32 number, got {_show(value)}")
    return float(value)


def _flag(field: str, value: Any) -> bool:
    value = value or False
    if value is not True and value is not False:
        raise _bad(field, f"must be true or false, got {_show(value)}")
    return value


def _bias(value: Any) -> Literal["none", "all", "lora_only"]:
    match value or "none":
        case "none" | "all" | "lora_only" as bias:
            return bias
    raise _bad("bias", f'must be "none", "all" or "lora_only", got {_show(value)}')


def _module_names(value: Any) -> tuple[str, ...]:
    """modules_to_save, without order or repetitions; PEFT keeps a set."""
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(n, str) and n for n in names):
        raise _bad("modules_to_save", f"must be a list of names of modules, got {_show(value)}")
    return tuple(sorted(set(names)))


def _target_modules(value: Any) -> tuple[str, ...]:
    """A list of names; nothing where there is a regular expression, or whatever else: it changes no result."""
    listed = isinstance(value, list | tuple | set | frozenset) and all(isinstance(n, str) and n for n in value)
    return tuple(sorted(set(value))) if listed else ()


def _token_indices(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """trainable_token_indices by module; a bare list is embed_tokens'."""
    field = "trainable_token_indices"
    if not value:
        return ()
    by_module = value if isinstance(value, Mapping) else {"embed_tokens": value}
    for name, ids in by_module.items():
        good = isinstance(ids, list | tuple) and all(type(token) is int and 0 <= token < 2**31 for token in ids)
        if not isinstance(name, str) or not good or len(set(ids)) != len(ids):
            raise _bad(field, f"must give modules lists of token ids, each once, got {_show(name)}: {_show(ids)}")
    return tuple((name, tuple(ids)) for name, ids in sorted(by_module.items()) if ids)


@dataclass(frozen=True)
class ModulePattern:
    """One entry of rank_pattern or alpha_pattern.

    Attributes:
        key: regular expression for the end of a module's dotted name, from a dot on ("^" anchors it at the start).
        value: the rank or alpha of the modules that match.
    """

    key: str
    value: float
    regex: re.Pattern[str]

    @classmethod
    def compile(cls, field: str, key: str, value: float) -> ModulePattern:
        plain = re.sub(r"\\.", "x", key, flags=re.DOTALL)
        costly = (
            len(key) > _MAX_PATTERN_LENGTH
            or re.search(r"\)\s*[*+{]|\(\?(?![:!=]|<[!=])", plain)
            or len(re.findall(r"[*+?{]", plain.replace("(?", "("))) > _MAX_QUANTIFIERS
            or plain.count("(") > _MAX_GROUPS
        )
        if costly:
            raise _bad(
                field,
                f"has a key that could take very long to match: {_show(key)}; use at most {_MAX_PATTERN_LENGTH} "
                f"characters, {_MAX_QUANTIFIERS} quantifiers and {_MAX_GROUPS} groups, and repeat no group",
            )
        try:
            return cls(key, value, re.compile(rf"(.*\.)?({key})$"))
        except (re.error, RecursionError, OverflowError) as error:
            raise _bad(field, f"has a key that is no regular expression: {_show(key)} ({error})") from None


def _patterns(field: str, value: Any, read: Any) -> tuple[ModulePattern, ...]:
    if not value:
        return ()
    if not isinstance(value, dict):
        raise _bad(field, f"must be an object from module names to numbers, got {_show(value)}")
    return tuple(ModulePattern.compile(field, key, read(field, number)) for key, number in value.items())


@dataclass(frozen=True)
class PeftConfig:
    """The part of adapter_config.json that decides what the adapter computes.

    Attributes:
        r: rank of the modules that no rank_pattern matches.
        lora_alpha: alpha of the modules that no alpha_pattern matches.
        use_rslora: divide alpha by sqrt(r) in place of r.
        rank_pattern, alpha_pattern: per-module values, the first match wins.
        use_dora: every module with A and B has a magnitude too.
        bias: whether the file holds biases in place of the base's: "none", "lora_only" or "all".
        lora_bias: every B has a bias.
        modules_to_save: ends of the names of modules that are replaced whole.
        trainable_token_indices: (module, token ids) of the rows that are replaced.
        ensure_weight_tying: what is trained on one of embed_tokens and lm_head is trained on both, where the base ties
            them.
        base_model_name_or_path: what the adapter says it was trained on; advisory, never fetched.
        target_modules: ends of the names of the modules meant, where they are listed; advisory, the weights decide.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: tuple[ModulePattern, ...] = ()
    alpha_pattern: tuple[ModulePattern, ...] = ()
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ensure_weight_tying: bool = False
    base_model_name_or_path: str | None = None
    target_modules: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_dict(cls, raw: Any) -> PeftConfig:
        """Reads the parsed JSON.

        Raises:
            AdapterError: a value of the wrong type (`bad_adapter_config`), or a known or unknown field that would
                change the result and is not served (`unsupported_adapter_feature`); `param` names the field.
        """
        if not isinstance(raw, Mapping):
            raise _bad("the file", "must hold a JSON object")
        if not raw.get("peft_type"):
            raise _bad("peft_type", 'is missing: only "LORA" adapters are served')
        if str(raw["peft_type"]).upper() != "LORA":
            raise unsupported("peft_type", f'only "LORA" is served, got {_show(raw["peft_type"])}')
        _refuse_unserved(raw)
        flags = {
            field: _flag(field, raw.get(field))
            for field in ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying")
        }  # fmt: skip
        if flags["use_dora"] and flags["lora_bias"]:
            raise _bad("lora_bias", "cannot go with use_dora, as in PEFT")
        base = raw.get("base_model_name_or_path")
        r, alpha = raw.get("r"), raw.get("lora_alpha")
        return cls(
            r=DEFAULT_RANK if r is None else _rank("r", r),
            lora_alpha=DEFAULT_ALPHA if alpha is None else _alpha("lora_alpha", alpha),
            rank_pattern=_patterns("rank_pattern", raw.get("rank_pattern"), _rank),
            alpha_pattern=_patterns("alpha_pattern", raw.get("alpha_pattern"), _alpha),
            bias=_bias(raw.get("bias")),
            modules_to_save=_module_names(raw.get("modules_to_save")),
            trainable_token_indices=_token_indices(raw.get("trainable_token_indices")),
            # Half of a surrogate pair, which JSON can spell, could not be told in an answer.
            base_model_name_or_path=base.encode("utf-8", "replace").decode() if isinstance(base, str) else None,
            target_modules=_target_modules(raw.get("target_modules")),
            **flags,
        )

    @classmethod
    def from_json(cls, text: bytes) -> PeftConfig:
        """Reads adapter_config.json's bytes; raises what `from_dict` does."""
        try:
            raw = json.loads(text.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            raise _bad("the file", "is not valid JSON") from None
        return cls.from_dict(raw)

    def rank_of(self, module_path: str) -> int:
        """Rank that the config gives to a module, by its dotted name ("model.layers.0.self_attn.q_proj")."""
        return int(_first_match(self.rank_pattern, module_path, self.r))

    def scale_of(self, module_path: str) -> float:
        """Factor on `B A x` of a module, by its dotted name."""
        rank, alpha = self.rank_of(module_path), _first_match(self.alpha_pattern, module_path, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def saves(self, module_path: str) -> bool:
        """Whether modules_to_save means a module, by its dotted name: the bare end of it decides, as in PEFT."""
        return any((PREFIX + module_path).endswith(end) for end in self.modules_to_save)

    def canonical_json(self) -> bytes:
        """The fields that change the result, written in one way only (for the digest)."""
        fields = {
            "r": self.r, "lora_alpha": self.lora_alpha, "use_rslora": self.use_rslora,
            "rank_pattern": [[p.key, int(p.value)] for p in self.rank_pattern],
            "alpha_pattern": [[p.key, p.value] for p in self.alpha_pattern],
            "use_dora": self.use_dora, "bias": self.bias, "lora_bias": self.lora_bias,
            "modules_to_save": self.modules_to_save, "trainable_token_indices": self.trainable_token_indices,
            "ensure_weight_tying": self.ensure_weight_tying,
        }  # fmt: skip
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _first_match(patterns: tuple[ModulePattern, ...], module_path: str, default: float) -> float:
    return next((p.value for p in patterns if p.regex.match(module_path)), default)


def _refuse_unserved(raw: Mapping[str, Any]) -> None:
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise unsupported(
            "init_lora_weights",
            f"{_show(start)} trains against a base it has changed: save it with PEFT's "
            "path_initial_model_for_weight_conversion to get an ordinary adapter",
        )
    if start is not None and not isinstance(start, bool | str):
        raise _bad("init_lora_weights", f"must be true, false or a name, got {_show(start)}")
    for name, value in raw.items():
        if value and name not in _READ and name not in _INERT:
            raise unsupported(name, f"got {_show(value)}")
