"""Block sizes of the segmented kernels: a heuristic for any shape, replaced by measured ones where there are some."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels import tuning
from pallas_kernels.segmented_lora.plan import Segments

OP = "segmented_lora"
_PROGRAMS = 264
"""Programs that a launch should have at least: two for each of an H200's 132 multiprocessors."""


@dataclass(frozen=True)
class ShrinkBlocks:
    """Of the shrink: features of a step, parts of the input that programs share out, Triton's warps and stages."""

    chunk: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class ExpandBlocks:
    """Of the expand: outputs of a step, steps of a program, Triton's warps and stages."""

    chunk: int
    steps: int
    num_warps: int = 4
    num_stages: int = 3


def power_of_two_divisor(width: int, largest: int) -> int:
    """The largest power of two that divides width and is at most `largest`."""
    return min(width & -width, largest)


def divisor(number: int, wanted: int) -> int:
    """The smallest divisor of number that is at least `wanted`, else the largest at all."""
    return next(d for d in range(min(max(wanted, 1), number), number + 1) if number % d == 0)


def _chunk(unit: int, largest: int) -> int:
    chunk = power_of_two_divisor(unit, largest)
    if chunk < 16:
        raise NotImplementedError(f"units of {unit} elements are no whole number of 16: a kernel's least step")
    return chunk


def shrink_blocks(part: Segments, in_dim: int, modules: int, unit: int, dtype: str) -> ShrinkBlocks:
    """Blocks of one shrink launch.

    Few tiles share out the input, so that every multiprocessor reads; many do not, as each part costs a partial sum.
    """
    C, W, K = part.block_tokens, len(part.row_W), part.tile_rows
    exact = dtype == "float32"  # without tensor cores: the products themselves fill the registers
    chunk = _chunk(unit, 128 if C <= 32 and not exact else 64 if not exact or C <= 32 else 32)
    splits = divisor(in_dim // chunk, min(-(-_PROGRAMS // W), 8 if C <= 32 else 2))
    heuristic = ShrinkBlocks(chunk, splits if splits <= 16 else 1, num_warps=4 if C <= 32 else 8)
    key = {"op": "shrink", "tiles": tuning.bucket(W), "tokens": C, "rows": K, "in": in_dim, "modules": modules}
    return tuning.lookup(OP, key | {"unit": unit, "dtype": dtype}, heuristic)


def expand_blocks(part: Segments, out_dims: tuple[int, ...], unit: int, dtype: str) -> ExpandBlocks:
    """Blocks of one expand launch: steps that a block's outputs are shared out in, as wide as registers allow."""
    C, N, total = part.block_tokens, len(part.token_NC), sum(out_dims)
    chunk = _chunk(unit, 128 if C <= 32 and dtype != "float32" else 64)
    columns = total // chunk
    steps = max(d for d in (1, 2, 4, 8) if columns % d == 0 and (d == 1 or N * columns // d >= 2 * _PROGRAMS))
    heuristic = ExpandBlocks(chunk, steps, num_warps=4 if C <= 32 else 8)
    key = {"op": "expand", "blocks": tuning.bucket(N), "tokens": C, "rows": part.tile_rows, "out": total}
    return tuning.lookup(OP, key | {"unit": unit, "dtype": dtype}, heuristic)
