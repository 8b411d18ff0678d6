"""LoRA products of many adapters in one batch (S-LoRA section 5.3, Punica section 4).

`lora_delta` and `lora_matmul` run on any device by the best implementation that it has; `lora_shrink`, `lora_expand`
and the functions `lora_deltas_of_...` are plain XLA over dense buffers of active rows.
"""

from pallas_kernels.segmented_lora.api import lora_constants, lora_delta, lora_matmul
from pallas_kernels.segmented_lora.plan import Plan, Segments, SegmentShape, make_plan, trace_plan
from pallas_kernels.segmented_lora.rank_rows import LayerRankRows, RankRows
from pallas_kernels.segmented_lora.reference import lora_delta_reference, lora_mix_reference
from pallas_kernels.segmented_lora.xla import lora_expand, lora_shrink
from pallas_kernels.segmented_lora.xla_blocks import BlockUsers, lora_deltas_of_blocks
from pallas_kernels.segmented_lora.xla_pieces import PromptPieces, add_lora_of_pieces

__all__ = [
    "BlockUsers",
    "LayerRankRows",
    "Plan",
    "PromptPieces",
    "RankRows",
    "SegmentShape",
    "Segments",
    "add_lora_of_pieces",
    "lora_constants",
    "lora_delta",
    "lora_delta_reference",
    "lora_deltas_of_blocks",
    "lora_expand",
    "lora_matmul",
    "lora_mix_reference",
    "lora_shrink",
    "make_plan",
    "trace_plan",
]
