"""The `lora` field of a request: one adapter or a weighted mix of several, each with a factor on its delta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multilora_jax.errors import UserError
from multilora_jax.request import MAX_SCALE

MAX_ADAPTERS = 16
"""Most adapters in one mix."""


@dataclass(frozen=True)
class MixEntry:
    """An adapter as a request names it, and the factor on its delta."""

    name: str
    scale: float = 1.0


def check_mix(value: Any) -> list[MixEntry]:
    """The adapters that a `lora` field names; none for null and for an empty list.

    Args:
        value: `[{"name": str, "scale": number}, ...]`, or one such object alone; scale is 1 where it is left out.

    Raises:
        UserError: param is `lora`, and the message says which entry is at fault.
    """
    if value is None:
        return []
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise _bad(f'must be a list of {{"name": …, "scale": …}}, not {value!r:.100}', "bad_type")
    if len(items) > MAX_ADAPTERS:
        raise _bad(f"names {len(items)} adapters: at most {MAX_ADAPTERS} can be mixed", "too_many_adapters")
    entries = [_entry(item, f"[{i}]" if value is items else "") for i, item in enumerate(items)]
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise _bad(f"names {name[:100]!r} more than once: add up its scales in one entry", "duplicate_adapter")
    return entries


def _entry(item: Any, where: str) -> MixEntry:
    if not isinstance(item, dict):
        raise _bad(f'{where} must be an object {{"name": …, "scale": …}}, not {item!r:.100}', "bad_type")
    for field in item:
        if field not in ("name", "scale"):
            raise _bad(f"{where} has an unknown field {field[:100]!r}: it takes name and scale", "unknown_parameter")
    name, scale = item.get("name"), item.get("scale")
    if not isinstance(name, str) or not name.strip():
        raise _bad(f"{where}.name must be an adapter's name, not {name!r:.100}", "bad_value")
    if scale is None:
        return MixEntry(name)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not abs(scale) <= MAX_SCALE:  # so written, it is true of NaN too
        limits = f"a number from -{MAX_SCALE:g} to {MAX_SCALE:g}"
        raise _bad(f"{where}.scale must be {limits}, not {scale!r:.100}", "bad_lora_scale")
    return MixEntry(name, float(scale))


def _bad(what: str, reason: str) -> UserError:
    return UserError(f"lora{what}" if what.startswith(("[", ".")) else f"lora {what}", reason=reason, param="lora")
