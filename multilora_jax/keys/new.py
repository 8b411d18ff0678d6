"""`keys new`: makes a key and the entry that stands for it in the server's file of keys."""

from __future__ import annotations

from typing import Any

import yaml
from absl import flags as absl_flags

from multilora_jax.key_file import hash_key, new_key, read_entry

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = ""
EXAMPLE = 'python -m multilora_jax.keys new --tenant team-a --adapters "team-a-*" --requests_per_minute 600'
ABOUT = """Prints a fresh key, which is shown this once, and the entry to put under `keys:` in the file that the key
keys_file of the configuration names. The entry holds the key's SHA-256 only. The server reads it when it starts."""
LISTS = ("adapters",)

_LIMITS = {
    "requests_per_minute": "Most requests a minute, others than GET; by default any number.",
    "tokens_per_minute": "Most tokens of prompts and answers a minute; by default any number.",
    "max_concurrent": "Most requests at once; by default any number.",
    "best_priority": "Lowest number that requests may send as `priority` (lower runs earlier); by default 0.",
}


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags."""
    absl_flags.DEFINE_string("tenant", None, "Whose key it is.", required=True, flag_values=flag_values)
    absl_flags.DEFINE_multi_string(
        "adapters", None, "Names or patterns (*, ?, [seq]) of the adapters to use and see", flag_values=flag_values
    )
    for name, text in _LIMITS.items():
        absl_flags.DEFINE_integer(name, None, text, flag_values=flag_values)
    absl_flags.DEFINE_boolean("metrics", False, "Whether it may read /metrics.", flag_values=flag_values)
    absl_flags.DEFINE_boolean("admin", False, "Whether it may do everything.", flag_values=flag_values)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    key = new_key()
    entry: dict[str, Any] = {"tenant": flag_values.tenant, "sha256": hash_key(key)}
    entry["adapters"] = list(flag_values.adapters or [])
    entry |= {name: flag_values[name].value for name in _LIMITS if flag_values[name].value is not None}
    entry |= {name: True for name in ("metrics", "admin") if flag_values[name].value}
    read_entry(entry, "the new key")
    print(f"key (shown once; give it to its owner over a safe way):\n\n  {key}\n")
    print("entry for the list `keys:` of the server's keys_file:\n")
    text = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True)
    print("".join(f"  {line}\n" for line in text.splitlines()), end="")
    return 0
