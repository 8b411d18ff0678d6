"""From the configuration's words to a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from multilora_jax.config import EngineConfig
from multilora_jax.engine.policies.base import Lcfs, Policy


@dataclass(frozen=True)
class PolicyConfig:
    """The parameters of all policies; each takes what is its own. The names are those of EngineConfig.

    Attributes:
        scheduling_policy: a key of POLICIES.
        first_token_objective_s: seconds from arrival within which the first token is wanted; None for no objective.
        cluster_adapters: distinct adapters in the batch from which on requests for these go first.
        fair_weights: share of a party by name, 1 for those not named.
        fair_output_cost: what a generated token counts, in prompt tokens.
    """

    scheduling_policy: str = "fcfs"
    first_token_objective_s: float | None = None
    cluster_adapters: int = 8
    fair_weights: Mapping[str, float] = field(default_factory=dict)
    fair_output_cost: float = 2.0

    @classmethod
    def of(cls, config: EngineConfig) -> PolicyConfig:
        """Those keys of the engine's configuration."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})


POLICIES: dict[str, Callable[[PolicyConfig], Policy]] = {
    "fcfs": lambda _: Policy(),
    "lcfs": lambda _: Lcfs(),
}
"""Name to what makes the policy."""


def make_policy(config: PolicyConfig) -> Policy:
    """A fresh policy, for one scheduler."""
    return POLICIES[config.scheduling_policy](config)
