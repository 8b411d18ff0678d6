"""The configuration's keys about who is served when: their descriptions and ranges, and what they must be together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from multilora_jax.config_values import key_info
from multilora_jax.errors import ConfigError

if TYPE_CHECKING:
    from multilora_jax.config import EngineConfig

PolicyName = Literal["fcfs", "lcfs", "cluster", "fair", "abort", "deadline"]

SCHEDULING: Mapping[str, dict[str, Any]] = {
    "scheduling_policy": key_info(
        "Who of those that wait is served first. fcfs: first come; lcfs: last come; cluster: whose adapter is in the "
        "batch already (cluster_adapters); fair: who had least of its share (fair_by, fair_weights); abort: S-LoRA's "
        "early abort against first_token_objective_s; deadline: as many first tokens within it as can be. Priorities "
        "come first under all of them."
    ),
    "first_token_objective_s": key_info(
        "Seconds from arrival within which a first token is wanted. abort and deadline need it, and answer what "
        "cannot make it with 503 and Retry-After.",
        above=0,
    ),
    "max_overtakes": key_info(
        "Requests that may start before one whose adapter is not in yet, until nobody behind it may.", low=0
    ),
    "max_overtake_s": key_info("The same in seconds since the first of them; no such bound by default.", low=0),
    "cluster_adapters": key_info(
        "cluster: from so many distinct adapters in the batch on, requests for these go first (S-LoRA's d).", low=1
    ),
    "fair_by": key_info(
        "fair: what shares are counted for. adapter; or tenant: that of the request's key in keys_file, else its "
        "`user`, else its `cache_salt`, else its adapter."
    ),
    "fair_weights": key_info(
        "fair: shares by name of adapter or tenant, as a mapping or a list of name=weight; 1 for those not named."
    ),
    "fair_output_cost": key_info("fair: what a generated token counts, in prompt tokens.", low=0),
    "fair_spare_seats": key_info(
        "fair: seats that adapters or tenants which have their share leave free, so that the next to come need not "
        "wait for one; by default a sixteenth of max_num_seqs.",
        low=0,
    ),
    "max_seqs_per_adapter": key_info(
        "Most sequences of one adapter that run at once; others pass those that wait for it. No cap by default.", low=1
    ),
    "adapter_requests_per_s": key_info(
        "Most requests a second for one adapter; beyond it they get 429 and Retry-After. No cap by default.", above=0
    ),
    "adapter_request_burst": key_info("Requests that one adapter may get at once beside that rate.", low=1),
    "max_queued_requests": key_info(
        "Requests that may wait, beside those for whom a seat is free; further ones get 429 and Retry-After. Under "
        "fair the last eighth is kept for those that have less than their share. No cap by default.",
        low=0,
    ),
    "long_prefill_token_threshold": key_info(
        "Most tokens of one prompt in a step, so that others have room beside a long one; by default as many as fit.",
        low=1,
    ),
    "target_step_ms": key_info(
        "Milliseconds that a step with decodes should take at most: prompts are cut into chunks that fit, by the "
        "times of the steps before. By default only max_num_batched_tokens bounds them.",
        above=0,
    ),
}
"""Key to its metadata."""


def check_scheduling(config: EngineConfig) -> None:
    """Raises ConfigError, naming a key, where the policy lacks what it needs."""
    policy = config.scheduling_policy
    if policy in ("abort", "deadline") and config.first_token_objective_s is None:
        raise ConfigError(
            f"scheduling_policy {policy} needs first_token_objective_s: give the seconds within which a first token "
            f"is wanted",
            reason="missing_key", param="first_token_objective_s",
        )  # fmt: skip
    for name, weight in config.fair_weights.items():
        if weight <= 0:
            raise ConfigError(
                f"fair_weights: the weight of {name!r} must be above 0, got {weight:g}",
                reason="bad_value", param="fair_weights",
            )  # fmt: skip
