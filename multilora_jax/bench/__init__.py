"""Benchmarks (`python -m multilora_jax.bench COMMAND --config FILE ...`) and the mixes of adapters that they share."""
