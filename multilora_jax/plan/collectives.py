"""Collectives of compiled programs, read from their optimised HLO, and what S-LoRA's formula says of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ({'|'.join(_KINDS)})(-start)?\(", re.MULTILINE)
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2}


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        shapes: of the arrays that it yields on each device; several where the compiler joined several.
        nbytes: bytes of these arrays.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """Elements of the result on each device."""
        return sum(_product(shape) for shape in self.shapes)

    def sent(self, num_devices: int) -> float:
        """Bytes that each device sends where the devices form a ring: twice (N-1)/N of an all-reduce's result."""
        share = (num_devices - 1) / num_devices
        return self.nbytes * share * (2 if self.kind == "all-reduce" else 1)


def read_collectives(hlo: str) -> list[Collective]:
    """The collectives of an optimised HLO, in its order; one inside a loop's body counts once."""
    found = []
    for match in _INSTRUCTION.finditer(hlo):
        arrays = [(name, _shape(sizes)) for name, sizes in _ARRAY.findall(match[1])]
        if match[3] and match[2] != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # the asynchronous form yields its operands too
        nbytes = sum(_product(shape) * (_BYTES.get(name) or int(name[1:]) // 8) for name, shape in arrays)
        found.append(Collective(match[2], tuple(shape for _, shape in arrays), nbytes))
    return found


def base_formula(num_devices: int, tokens: int, hidden: int) -> float:
    """Elements that each device sends for the base's attention, one all-reduce (S-LoRA, section 6)."""
    return 2 * (num_devices - 1) / num_devices * tokens * hidden


def slora_formula(num_devices: int, tokens: int, rank: int) -> float:
    """Elements that each device sends for the adapters of q, k, v and o by S-LoRA's strategy: 5 (N-1) B r / N."""
    return 5 * (num_devices - 1) / num_devices * tokens * rank


def our_formula(num_devices: int, tokens: int, rows: int, modules: int) -> float:
    """Elements that each device sends for adapters here: one all-reduce of `rows` for each token and module."""
    return 2 * (num_devices - 1) / num_devices * tokens * rows * modules


def total_sent(found: Iterable[Collective], num_devices: int) -> float:
    """Bytes that each device sends for some collectives."""
    return sum(collective.sent(num_devices) for collective in found)


def _shape(sizes: str) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes.split(",") if size)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
