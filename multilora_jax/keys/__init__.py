"""API keys from the command line: `python -m multilora_jax.keys`."""
