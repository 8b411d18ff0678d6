"""Adapters from the command line.

python -m multilora_jax.adapters validate PATH... --config FILE      would a server take them, and what do they need
python -m multilora_jax.adapters make --num 100 --model MODEL --out DIR       random ones, for tests and benchmarks
python -m multilora_jax.adapters list --url http://127.0.0.1:8000             those of a running server
"""

from __future__ import annotations

from multilora_jax import flags
from multilora_jax.adapters import listing, make, validate

COMMANDS = {"validate": validate, "make": make, "list": listing}

if __name__ == "__main__":
    flags.run_command(COMMANDS, __doc__ or "")
