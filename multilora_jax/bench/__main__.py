"""Benchmarks of the engine.

  python -m multilora_jax.bench throughput --config configs/smollm2.yaml --mix base,identical,distinct

throughput: new tokens per second of a batch of random prompts, for one or more mixes of adapters, which take turns in
one process and one engine; beside each mix's ratio to the base alone stands the ratio that the bytes read would allow.

max_num_seqs is 8 here, whatever the file says, unless --max_num_seqs gives another, and max_rank_rows what that many
sequences with adapters of their own need, unless --max_rank_rows is given. --num_adapters is max_num_seqs by default.

Prints a table, writes JSON where --json says. Every key of the configuration is a flag too.
"""

from __future__ import annotations

import logging

from multilora_jax import flags
from multilora_jax.bench import throughput

COMMANDS = {"throughput": throughput.main}


def main(words: list[str]) -> int:
    """Entry point: runs the command that is named."""
    # jax reports every accelerator that it does not find at the level of information.
    logging.getLogger("jax").setLevel(logging.WARNING)
    return COMMANDS[words[0]]()


if __name__ == "__main__":
    flags.define_flags()
    throughput.define_flags()
    flags.run(
        main,
        commands=tuple(COMMANDS),
        about=__doc__ or "",
        example="python -m multilora_jax.bench throughput --config configs/smollm2.yaml --mix base,identical,distinct",
    )
