"""Operations that multi-LoRA serving needs, usable in any JAX program: segmented LoRA and paged attention.

Every operation has an unoptimised float32 oracle (`reference`) and an XLA implementation that runs on any device.
"""
