"""Benchmarks: of the engine in one process, of a server over HTTP, and beside other engines.

python -m multilora_jax.bench throughput --config FILE --mix base,distinct       speed by mix of adapters
python -m multilora_jax.bench adapters --config FILE --counts 1,10,100,1000      speed by number of adapters
python -m multilora_jax.bench adapters --config FILE --cold                      latency of adapters read from disk
python -m multilora_jax.bench prefix --config FILE                               first tokens of equal prompt starts
python -m multilora_jax.bench lookup --config FILE                               prompt lookup and without
python -m multilora_jax.bench structured --config FILE                           answers that follow a JSON schema
python -m multilora_jax.bench quality --config FILE                              smaller weights against float32
python -m multilora_jax.bench latency --config FILE --batch-size 8               times of one batch, step by step
python -m multilora_jax.bench trace --dummy --policy fcfs,abort --sweep rate=1,2,4   S-LoRA's workloads under load
python -m multilora_jax.bench serve --base-url URL --request-rate 4              times and goodput of a server
python -m multilora_jax.bench overhead --config FILE                             what HTTP costs
python -m multilora_jax.bench soak --config FILE --minutes 10                    a server under all that clients do
python -m multilora_jax.bench peers --config FILE                                beside transformers and PEFT
python -m multilora_jax.bench plot REPORT.json OUT.png                           a picture of what --json wrote
"""

from __future__ import annotations

import logging

from multilora_jax import flags
from multilora_jax.bench import (
    adapters,
    latency,
    lookup,
    overhead,
    peers,
    plot,
    prefix,
    quality,
    serve,
    soak,
    structured,
    throughput,
    trace,
)

COMMANDS = {
    "throughput": throughput, "adapters": adapters, "prefix": prefix, "structured": structured, "quality": quality,
    "latency": latency, "serve": serve, "peers": peers, "plot": plot, "lookup": lookup, "trace": trace,
    "soak": soak, "overhead": overhead,
}  # fmt: skip

if __name__ == "__main__":
    # jax reports every accelerator that it does not find at the level of information.
    logging.getLogger("jax").setLevel(logging.WARNING)
    # And httpx every request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    flags.run_command(COMMANDS, __doc__ or "")
