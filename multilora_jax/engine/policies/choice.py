"""From the configuration's words to a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from multilora_jax.config import EngineConfig
from multilora_jax.engine.policies.abort import Abort
from multilora_jax.engine.policies.base import Lcfs, Policy
from multilora_jax.engine.policies.cluster import Cluster
from multilora_jax.engine.policies.deadline import Deadline
from multilora_jax.engine.policies.fair import Fair
from multilora_jax.errors import ConfigError


@dataclass(frozen=True)
class PolicyConfig:
    """The parameters of all policies; each takes what is its own. The names are those of EngineConfig.

    Attributes:
        scheduling_policy: a key of POLICIES.
        first_token_objective_s: seconds from arrival within which the first token is wanted; None for no objective.
        cluster_adapters: distinct adapters in the batch from which on requests for these go first.
        fair_weights: share of a party by name, 1 for those not named.
        max_overtakes, max_overtake_s: see SchedulerConfig.
        fair_output_cost: what a generated token counts, in prompt tokens.
        fair_spare_seats: see Fair; None for a sixteenth of all.
        max_num_seqs: most running sequences.
    """

    scheduling_policy: str = "fcfs"
    first_token_objective_s: float | None = None
    cluster_adapters: int = 8
    fair_weights: Mapping[str, float] = field(default_factory=dict)
    max_overtakes: int = 64
    max_overtake_s: float | None = None
    fair_output_cost: float = 2.0
    fair_spare_seats: int | None = None
    max_num_seqs: int = 32

    @property
    def spare_seats(self) -> int:
        return self.max_num_seqs // 16 if self.fair_spare_seats is None else self.fair_spare_seats

    @property
    def objective_s(self) -> float:
        """Raises ConfigError where there is none."""
        if self.first_token_objective_s is None:
            raise ConfigError(
                f"scheduling_policy {self.scheduling_policy} needs first_token_objective_s: give the seconds within "
                f"which a first token is wanted",
                reason="missing_key", param="first_token_objective_s",
            )  # fmt: skip
        return self.first_token_objective_s

    @classmethod
    def of(cls, config: EngineConfig) -> PolicyConfig:
        """Those keys of the engine's configuration."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})


POLICIES: dict[str, Callable[[PolicyConfig], Policy]] = {
    "fcfs": lambda _: Policy(),
    "lcfs": lambda _: Lcfs(),
    "cluster": lambda config: Cluster(config.cluster_adapters, config.max_overtakes, config.max_overtake_s),
    "fair": lambda config: Fair(config.fair_weights, config.fair_output_cost, config.spare_seats),
    "abort": lambda config: Abort(config.objective_s),
    "deadline": lambda config: Deadline(config.objective_s),
}
"""Name to what makes the policy."""


def make_policy(config: PolicyConfig) -> Policy:
    """A fresh policy, for one scheduler."""
    return POLICIES[config.scheduling_policy](config)
