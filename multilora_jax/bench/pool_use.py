"""How much of the pool adapters take, against what they need and what padded slots would take (host arithmetic)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multilora_jax.memory.allocator import PageKind

if TYPE_CHECKING:
    from multilora_jax.engine.llm_engine import LLMEngine


@dataclass
class PoolUse:
    """The moment at which adapters held most pages.

    Attributes:
        largest_rank: what a padded store would pad every adapter to.
        pages: that adapters held.
        num_adapters: that held them.
        exact_pages: their own units, as a (broken) number of pages.
        padded_pages: pages that a store of slots of the largest rank, with all modules, would take for them.
    """

    largest_rank: int
    pages: int = 0
    num_adapters: int = 0
    exact_pages: float = 0.0
    padded_pages: int = 0

    def update(self, engine: LLMEngine) -> None:
        """Looks at the pool; cheap while nothing is larger than before."""
        pages = engine.allocator.count(PageKind.ADAPTER)
        if pages <= self.pages:
            return
        layouts = [adapter.layout for adapter in engine.cache.residents()]
        slot_units = self.largest_rank * engine.geometry.num_layers
        slot_units *= int((layouts[0].units_a_M + layouts[0].units_b_M).sum())
        self.pages, self.num_adapters = pages, len(layouts)
        self.exact_pages = sum(layout.num_units for layout in layouts) / engine.geometry.units_per_page_all_layers
        self.padded_pages = engine.geometry.pages_for_units(len(layouts) * slot_units)

    @property
    def fragmentation(self) -> float:
        """Pages held over pages needed, 1 at best."""
        return self.pages / self.exact_pages if self.exact_pages else 1.0

    def row(self) -> dict[str, Any]:
        """Its part of a report's row."""
        return {
            "peak_adapter_pages": self.pages,
            "peak_adapters": self.num_adapters,
            "fragmentation": self.fragmentation,
            "padded_slot_pages": self.padded_pages,
        }

    def line(self) -> str:
        """The same in words."""
        if not self.pages:
            return "fragmentation: no adapter was in the pool"
        return (
            f"fragmentation: at most {self.pages} pages were held, by {self.num_adapters} adapters: "
            f"{self.fragmentation:.3f} x their own units; slots padded to rank {self.largest_rank} and to all modules "
            f"would take {self.padded_pages} pages ({self.padded_pages / self.pages:.1f} x)"
        )
