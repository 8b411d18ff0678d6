"""Checks and conversions of configuration values: types, ranges, paths, and a YAML reader that repeats no key."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import MISSING, Field
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import yaml

if TYPE_CHECKING or not yaml.__with_libyaml__:
    from yaml import SafeLoader
else:  # some 10 times as fast, which a file of thousands of adapters notices
    from yaml import CSafeLoader as SafeLoader

from multilora_jax.config_model import shape_of
from multilora_jax.errors import ConfigError, NotFoundError


def key_info(
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> dict[str, Any]:
    """Metadata of one key: its description and its range (`above` is an open lower end)."""
    return {"doc": doc, "low": low, "high": high, "above": above}


def default_of(f: Field[Any]) -> Any:
    """A key's default; None for the one key that has none."""
    if f.default_factory is not MISSING:
        return f.default_factory()
    return None if f.default is MISSING else f.default


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` was probably meant to be."""
    found = difflib.get_close_matches(name.lower().replace("-", "_"), list(choices), n=1, cutoff=0.5)
    return found[0] if found else None


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form ORG/NAME."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model) is not None


def is_inline_template(text: str) -> bool:
    """Whether `text` is a Jinja template rather than the path of one."""
    return "{{" in text or "{%" in text


def typed_value(name: str, hint: Any, value: Any) -> Any:
    """`value`, if it has the type that the key declares; lists and mappings are brought to one form.

    Args:
        name: the key.
        hint: its resolved annotation: str, int, float, bool, a Literal of strings, `tuple[str, ...]`,
            `dict[str, str]`, `dict[str, float]`, `dict[str, object]`, or one of these or None.

    Raises:
        ConfigError: reason `bad_type` or `bad_value`.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else typed_value(name, next(a for a in args if a is not NoneType), value)
    if value is None:
        raise _bad(name, "is empty: leave the key out to take its default")
    if origin is Literal:
        if value not in args:
            close = nearest(value, args) if isinstance(value, str) else None
            guess = f": did you mean {close}?" if close else ""
            raise _bad(name, f"must be one of {', '.join(args)}, got {value!r}{guess}", reason="bad_value")
        return value
    if origin is tuple:
        return _strings(name, value)
    if origin is dict:
        if args[1] is object:
            return shape_of(name, value)
        return _adapter_paths(name, value) if args[1] is str else _numbers(name, value)
    if hint is str:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(value, str) or not value.strip():
            raise _bad(name, f"must be a non-empty string, got {value!r}")
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise _bad(name, f"must be true or false, got {value!r}{_quotes_hint(value)}")
        return value
    if hint is int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _bad(name, f"must be an integer, got {value!r}{_quotes_hint(value)}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _bad(name, f"must be a number, got {value!r}{_quotes_hint(value)}")
    return float(value)


def check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Refuses a value outside the key's range.

    Args:
        metadata: `low`, `high` and `above` (an open lower end), each a number or None.
    """
    if value is None:
        return
    low, high, above = metadata["low"], metadata["high"], metadata["above"]
    if above is not None and value <= above:
        raise _bad(name, f"must be above {above:g}, got {value}", reason="bad_value")
    if low is not None and value < low:
        raise _bad(name, f"must be at least {low:.10g}, got {value}", reason="bad_value")
    if high is not None and value > high:
        raise _bad(name, f"must be at most {high:.10g}, got {value}", reason="bad_value")


def resolve_paths(values: Mapping[str, Any], base_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """`values` with `~` expanded and every relative path made absolute, counted from `base_dir`.

    `model` and `tokenizer` may be ids instead of paths: they are taken for a path if something exists there or
    they do not look like an id. Values of a wrong type are left for the type check.
    """
    base = Path(base_dir).absolute()

    def joined(path: Any) -> Any:
        is_path = isinstance(path, str | os.PathLike) and str(path).strip()
        return str(base / Path(path).expanduser()) if is_path else path

    out = dict(values)
    for key in ("model", "tokenizer"):
        value = out.get(key)
        if isinstance(value, str) and not value.startswith("pypi:"):
            path = joined(value)
            out[key] = value if is_hub_id(value) and not os.path.exists(path) else path
    if isinstance(out.get("chat_template"), str) and not is_inline_template(out["chat_template"]):
        out["chat_template"] = joined(out["chat_template"])
    for key in ("compilation_cache_dir", "lora_resolver_folder", "keys_file", "ssl_certfile", "ssl_keyfile"):
        if key in out:
            out[key] = joined(out[key])
    if isinstance(out.get("adapter_roots"), list | tuple):
        out["adapter_roots"] = [joined(root) for root in out["adapter_roots"]]
    if out.get("lora_modules") is not None:
        adapters = _adapter_paths("lora_modules", out["lora_modules"])
        out["lora_modules"] = {name: joined(path) for name, path in adapters.items()}
    return out


def read_yaml_mapping(path: Path) -> dict[Any, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping.

    Raises:
        NotFoundError: no such file.
        ConfigError: reason `bad_yaml`: not YAML, not a mapping, or a key given twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(f"no config file at {str(path)!r}", reason="config_not_found", param="config") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}", reason="bad_yaml", param="config") from error
    try:
        values = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}", reason="bad_yaml", param="config") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected lines of `key: value`, got {type(values).__name__}", reason="bad_yaml", param="config"
        )
    return values


class _UniqueKeyLoader(SafeLoader):
    """PyYAML keeps the last of two equal keys and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _bad(name: str, what: str, reason: str = "bad_type") -> ConfigError:
    return ConfigError(f"{name} {what}", reason=reason, param=name)


def _quotes_hint(value: Any) -> str:
    written = isinstance(value, str) and re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?|true|false", value, re.IGNORECASE)
    return " (a string: write plain digits, true or false without quotes)" if written else ""


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise _bad(name, f"must be a list of strings, got {type(value).__name__}")
    for i, item in enumerate(value):
        if not isinstance(item, str) or not item.strip():  # the value itself may be a secret
            raise _bad(name, f"must hold non-empty strings, entry {i} is of type {type(item).__name__}")
    return tuple(value)


def _adapter_paths(name: str, value: Any) -> dict[str, str]:
    """Name to path, from a mapping, a list of "name=path", or a list of {"name", "path"} mappings."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = [_adapter_pair(name, item) for item in value]
    else:
        raise _bad(name, f"must be a mapping of name to path or a list of name=path, got {value!r}")
    out: dict[str, str] = {}
    for adapter, path in pairs:
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(adapter, str) or not adapter.strip():
            raise _bad(name, f"the adapter name {adapter!r} must be a non-empty string: put it in quotes")
        if not isinstance(path, str) or not path.strip():
            raise _bad(name, f"the path of {adapter!r} must be a non-empty string, got {path!r}")
        if adapter in out:
            raise _bad(name, f"the adapter name {adapter!r} is given twice", reason="bad_value")
        out[adapter] = path
    return out


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Name to number, from a mapping or a list of "name=number"."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) and "=" in item for item in value):
        pairs = [item.rsplit("=", 1) for item in value]
        try:
            value = {key.strip(): float(number) for key, number in pairs}
        except ValueError:
            raise _bad(name, f"entries are name=number, got {value!r}") from None
        if len(value) < len(pairs):
            raise _bad(name, "names an entry twice", reason="bad_value")
    if not isinstance(value, Mapping):
        raise _bad(name, f"must be a mapping of name to number or a list of name=number, got {value!r}")
    for key, number in value.items():
        if not isinstance(key, str) or not key.strip():
            raise _bad(name, f"the name {key!r} must be a non-empty string: put it in quotes")
        typed_value(f"{name}: the value of {key!r}", float, number)
    return {key: float(number) for key, number in value.items()}


def _adapter_pair(name: str, item: Any) -> tuple[Any, Any]:
    if isinstance(item, str) and "=" in item:
        adapter, path = item.split("=", 1)
        return adapter.strip(), path.strip()
    if isinstance(item, Mapping) and {"name", "path"} <= set(item) <= {"name", "path", "base_model_name"}:
        return item["name"], item["path"]
    raise _bad(name, f"entries are name=path or {{name: …, path: …}}, got {item!r}")
