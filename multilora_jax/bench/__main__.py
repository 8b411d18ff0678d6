"""Benchmarks of the engine, in one process and without HTTP.

python -m multilora_jax.bench throughput --config FILE --mix base,distinct       speed by mix of adapters
python -m multilora_jax.bench adapters --config FILE --counts 1,10,100,1000      speed by number of adapters
python -m multilora_jax.bench adapters --config FILE --cold                      latency of adapters read from disk
python -m multilora_jax.bench prefix --config FILE                               first tokens of equal prompt starts
python -m multilora_jax.bench structured --config FILE                           answers that follow a JSON schema
python -m multilora_jax.bench quality --config FILE                              quantised base against float32
"""

from __future__ import annotations

import logging

from multilora_jax import flags
from multilora_jax.bench import adapters, prefix, quality, structured, throughput

COMMANDS = {
    "throughput": throughput, "adapters": adapters, "prefix": prefix, "structured": structured, "quality": quality,
}  # fmt: skip

if __name__ == "__main__":
    # jax reports every accelerator that it does not find at the level of information.
    logging.getLogger("jax").setLevel(logging.WARNING)
    flags.run_command(COMMANDS, __doc__ or "")
