"""Adapters from the command line (`python -m multilora_jax.adapters COMMAND`): check, make and list them (no jax)."""
