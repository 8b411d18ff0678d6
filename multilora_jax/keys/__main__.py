"""API keys from the command line.

python -m multilora_jax.keys new --tenant team-a --adapters "team-a-*"        a fresh key, and its entry for keys_file
"""

from __future__ import annotations

from multilora_jax import flags
from multilora_jax.keys import new

COMMANDS = {"new": new}

if __name__ == "__main__":
    flags.run_command(COMMANDS, __doc__ or "")
