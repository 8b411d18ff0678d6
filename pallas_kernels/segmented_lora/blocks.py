"""Block sizes of the segmented kernels: a heuristic for any shape, replaced by measured ones where there are some."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels import tuning
from pallas_kernels.segmented_lora.plan import MIN_BLOCK, Segments

OP = "segmented_lora"
_LEAST_CHUNK = 16
_PROGRAMS = 264
"""Programs that a launch should have at least: two for each of an H200's 132 multiprocessors."""

SHRINK_PROGRAMS = 4 * 132
"""Most programs of a shrink: those that an H200 runs at once. Where there are more tiles a program takes several."""


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


def check_unit(unit: int) -> None:
    """Raises NotImplementedError where no kernel can step through such units."""
    if unit % _LEAST_CHUNK:
        raise NotImplementedError(
            f"units of {unit} elements are no whole number of {_LEAST_CHUNK}: a kernel's least step"
        )


def _chunk(unit: int, largest: int) -> int:
    check_unit(unit)
    return power_of_two_divisor(unit, largest)


def shrink_key(part: Segments, in_dim: int, modules: int, unit: int, dtype: str) -> dict[str, int | str]:
    """What the best blocks of a shrink depend on."""
    tiles = tuning.bucket(len(part.row_W))
    key = {"op": "shrink", "tiles": tiles, "tokens": part.block_tokens, "rows": part.tile_rows, "in": in_dim}
    return key | {"modules": modules, "unit": unit, "dtype": dtype}


def expand_key(part: Segments, out_dims: tuple[int, ...], unit: int, dtype: str) -> dict[str, int | str]:
    """What the best blocks of an expand depend on."""
    blocks = tuning.bucket(len(part.token_NC))
    key = {"op": "expand", "blocks": blocks, "tokens": part.block_tokens, "rows": part.tile_rows, "out": sum(out_dims)}
    return key | {"modules": len(out_dims), "unit": unit, "dtype": dtype}


def shrink_blocks(part: Segments, in_dim: int, modules: int, unit: int, dtype: str) -> ShrinkBlocks:
    """Blocks of one shrink launch.

    Few tiles share out the input, so that every multiprocessor reads; many do not, as each part costs a partial sum.
    A bucket has room for more tiles than batches mostly have: as many as there are blocks are expected.
    """
    C, W = part.block_tokens, min(len(part.row_W), len(part.token_NC))
    exact = dtype == "float32"  # without tensor cores: the products themselves fill the registers
    # float32 prompts of several modules in steps of 32: ptxas of CUDA 13.5 spilled (4 bytes, jax 0.12).
    chunk = _chunk(unit, 128 if C <= 32 and not exact else 64 if not exact or C <= 32 else 32 if modules == 1 else 16)
    splits = divisor(in_dim // chunk, min(-(-_PROGRAMS // W), 8 if C <= 32 else 2))
    heuristic = ShrinkBlocks(chunk, splits if splits <= 16 else 1, num_warps=4 if C <= 32 else 8)
    return tuning.lookup(OP, shrink_key(part, in_dim, modules, unit, dtype), heuristic)


def expand_blocks(part: Segments, out_dims: tuple[int, ...], unit: int, dtype: str) -> ExpandBlocks:
    """Blocks of one expand launch: steps that a block's outputs are shared out in, as wide as registers allow."""
    C, N, total = part.block_tokens, len(part.token_NC), sum(out_dims)
    chunk = _chunk(unit, 128 if C <= 32 and dtype != "float32" else 64)
    columns = total // chunk
    # More than two steps: ptxas spilled (4 bytes, units of 128); so it did with two of three modules (jax 0.12), and of
    # tiles of 32 rows.
    lean = len(out_dims) == 1 and part.tile_rows == MIN_BLOCK
    steps = 2 if lean and columns % 2 == 0 and N * columns >= 4 * _PROGRAMS else 1
    heuristic = ExpandBlocks(chunk, steps, num_warps=4 if C <= 32 else 8)
    return tuning.lookup(OP, expand_key(part, out_dims, unit, dtype), heuristic)


def shrink_candidates(part: Segments, in_dim: int, unit: int) -> list[ShrinkBlocks]:
    """Blocks to measure."""
    return [
        ShrinkBlocks(chunk, splits, num_warps, num_stages)
        for chunk in (32, 64, 128, 256)
        for splits in (1, 2, 4, 8, 16)
        for num_warps in (2, 4, 8)
        for num_stages in (2, 3, 4)
        if unit % chunk == 0 and in_dim // chunk % splits == 0 and chunk * part.block_tokens <= 8192
    ]


def expand_candidates(part: Segments, out_dims: tuple[int, ...], unit: int) -> list[ExpandBlocks]:
    """Blocks to measure."""
    return [
        ExpandBlocks(chunk, steps, num_warps, num_stages)
        for chunk in (32, 64, 128, 256)
        for steps in (1, 2, 4, 8)
        for num_warps in (2, 4, 8)
        for num_stages in (2, 3)
        if unit % chunk == 0 and sum(out_dims) // chunk % steps == 0 and chunk * part.block_tokens <= 8192
    ]
