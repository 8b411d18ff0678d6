"""LoRA products of many adapters in one batch (S-LoRA section 5.3, Punica section 4)."""

from pallas_kernels.segmented_lora.reference import lora_delta_reference
from pallas_kernels.segmented_lora.xla import lora_deltas_of_rows, lora_expand, lora_shrink
from pallas_kernels.segmented_lora.xla_blocks import BlockUsers, lora_deltas_of_blocks

__all__ = [
    "BlockUsers",
    "lora_delta_reference",
    "lora_deltas_of_blocks",
    "lora_deltas_of_rows",
    "lora_expand",
    "lora_shrink",
]
