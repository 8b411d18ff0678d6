"""Attention over KV pages of the unified pool."""

from pallas_kernels.paged_attention.api import ragged_paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import attend_runs, paged_attention

__all__ = ["attend_runs", "paged_attention", "paged_attention_reference", "ragged_paged_attention"]
