"""Budgets of one step and the plan that the scheduler makes within them (host only, no jax)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError
from multilora_jax.request import Sequence

LEAST_PROMPT_TOKENS = 64
"""Prompt tokens of the smallest steps with prompts: a short prompt must not pay for a full step."""

LEAST_PACED_TOKENS = 16
"""The smallest size where a target keeps steps short: what a step of many decodes takes anyway, and half again."""

_MANY_SIZES, _MANY_PACED = 3, 6
"""From so many sizes on beside the largest, they are four times each other, not twice: each is several programs."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Budgets of one step.

    Attributes:
        max_num_seqs: most running sequences.
        max_num_batched_tokens: most prefill tokens.
        prefill_block: tokens of a prefill block; a chunk of n tokens takes ceil(n / prefill_block) blocks, of which
            a step has max_blocks.
        max_rank_rows: most rank rows over the distinct adapters of the running sequences.
        row_block: an adapter of n rows counts ceil(n / row_block) * row_block of them.
        max_loras: most distinct adapters; None for as many as their rows allow. The base model needs no slot.
        max_overtakes: admissions that may pass one waiting request before it blocks the queue; those that pass it
            while it only waits for a load in flight do not count.
        max_overtake_s: seconds after its first overtaking at which it blocks the queue too; None for no such bound.
        max_seqs_per_adapter: most running sequences of one adapter; None for no cap.
        max_queued_requests: requests that may wait beside those for whom a seat is free; None for no bound.
        adapter_requests_per_s: most requests a second of one adapter; None for no cap.
        adapter_request_burst: requests that one adapter may get at once beside that.
        target_step_s: seconds that a step with decodes should take at most; None for no target.
        prompt_sizes: sizes in prompt tokens that steps with prompts are padded to, ascending; used with a target.
        long_prefill_token_threshold: most tokens of one prompt in a step; None for all that fit.
        max_scan: waiting requests that one step passes over before it stops looking.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_block: int
    max_rank_rows: int
    row_block: int = 8
    max_loras: int | None = None
    max_overtakes: int = 64
    max_overtake_s: float | None = None
    max_seqs_per_adapter: int | None = None
    max_queued_requests: int | None = None
    adapter_requests_per_s: float | None = None
    adapter_request_burst: int = 8
    target_step_s: float | None = None
    prompt_sizes: tuple[int, ...] = ()
    long_prefill_token_threshold: int | None = None
    max_scan: int = 256

    def __post_init__(self) -> None:
        least = {
            "max_num_seqs": 1, "prefill_block": 1, "max_num_batched_tokens": self.prefill_block, "row_block": 1,
            "max_rank_rows": 0, "max_loras": 1, "max_overtakes": 0, "max_overtake_s": 0,
            "max_scan": 1, "max_seqs_per_adapter": 1, "max_queued_requests": 0, "adapter_request_burst": 1,
            "long_prefill_token_threshold": 1,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}", reason=name, param=name)

    @classmethod
    def of(cls, config: EngineConfig, prompt_sizes: tuple[int, ...] = ()) -> SchedulerConfig:
        """The budgets that a configuration asks for: keys of equal names, and its target in seconds.

        Args:
            config: the engine's.
            prompt_sizes: see the attribute.
        """
        own = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)}
        target = config.target_step_ms
        return cls(**own, target_step_s=None if target is None else target / 1000, prompt_sizes=prompt_sizes)

    def rank_rows(self, num_rows: int) -> int:
        """Rank rows that an adapter of so many rows takes of the budget."""
        return -(-num_rows // self.row_block) * self.row_block


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Decode rows of the steps without prompts that are compiled, ascending; steps with prompts have the largest.

    They go up from two rows by factors of four: each is several programs, and padding is cheap beside the weights.
    """
    return (*(n for n in (2 * 4**i for i in range(8)) if n < max_num_seqs), max(2, max_num_seqs))


def max_blocks(num_prompt_tokens: int, block: int) -> int:
    """Prefill blocks of a step of so many prompt tokens: enough where blocks are half full on average."""
    return -(-2 * num_prompt_tokens // block)


def prompt_sizes(max_prompt_tokens: int, block: int, *, paced: bool = False) -> tuple[int, ...]:
    """Prompt tokens of the steps with prompts that are compiled, ascending, the last being all that a step takes.

    They go up by doubling, or by four times where those were many: a step costs what its size does. None is nearly as
    large as the last.

    Args:
        max_prompt_tokens: of the largest.
        block: tokens of a prefill block.
        paced: a target keeps steps short. How long a size takes is not known before it runs, so that sizes from
            LEAST_PACED_TOKENS on must be at hand, else from LEAST_PROMPT_TOKENS or a block.
    """
    least, many = (LEAST_PACED_TOKENS, _MANY_PACED) if paced else (max(block, LEAST_PROMPT_TOKENS), _MANY_SIZES)
    sizes = list[int]()
    for factor in (2, 4):
        sizes = [n for n in (least * factor**i for i in range(32)) if 3 * n <= 2 * max_prompt_tokens]
        if len(sizes) < many:
            break
    return (*sizes, max_prompt_tokens)


@dataclass
class PrefillBudget:
    """What is left of a step for prompts.

    Attributes:
        tokens: prompt tokens; blocks: prefill blocks; block: tokens of one.
        longest: most tokens of one prompt.
        crowd: what is left of the tokens for those whom the policy restrains (Policy.crowd).
    """

    tokens: int
    blocks: int
    block: int
    longest: int
    crowd: int

    @classmethod
    def of(cls, config: SchedulerConfig, most: int | None = None) -> PrefillBudget:
        """That of a whole step, or of one of at most so many prompt tokens."""
        tokens, block = config.max_num_batched_tokens, config.prefill_block
        tokens = tokens if most is None else min(most, tokens)
        return cls(tokens, max_blocks(tokens, block), block, config.long_prefill_token_threshold or tokens, tokens)

    def chunk(self, num_pending: int, *, crowded: bool = False) -> int:
        """As many of a sequence's pending tokens as fit; of one of the crowd, where it is restrained."""
        most = min(self.tokens, self.crowd) if crowded else self.tokens
        return min(num_pending, most, self.blocks * self.block, self.longest)

    def take(self, num_tokens: int, *, crowded: bool = False) -> None:
        """Uses up what a chunk needs."""
        self.tokens -= num_tokens
        self.crowd = max(0, self.crowd - num_tokens) if crowded else self.crowd
        self.blocks -= -(-num_tokens // self.block)


@dataclass
class ScheduledStep:
    """What to run.

    Attributes:
        decodes: sequences with one pending token each.
        proposals: of some of the decodes: tokens that may follow the pending one, run in further decode rows.
        prefills: (sequence, n): its next n pending tokens, more than one pending.
        adapters: the distinct adapters of those, all resident; the order changes as little as possible between steps.
        ahead: after an idle time: resident adapters that steps to come will want besides.
        preempted: sequences that lost their pages while this step was planned; none of them is in it.
        after_idle: no sequence ran before it.
    """

    decodes: list[Sequence] = field(default_factory=list)
    proposals: dict[Sequence, list[int]] = field(default_factory=dict)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    adapters: list[Any] = field(default_factory=list)
    ahead: list[Any] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    after_idle: bool = False

    @property
    def sequences(self) -> list[Sequence]:
        """All that are in it."""
        return [*self.decodes, *(seq for seq, _ in self.prefills)]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prefills."""
        return sum(n for _, n in self.prefills)

    def num_blocks(self, block: int) -> int:
        """Prefill blocks of so many tokens that they take."""
        return sum(-(-n // block) for _, n in self.prefills)

    @property
    def num_decode_rows(self) -> int:
        """Rows of the decodes and their proposals."""
        return len(self.decodes) + sum(map(len, self.proposals.values()))
