"""Scheduling policies: small pure classes behind one interface (base.Policy), chosen by the configuration."""

from __future__ import annotations

from multilora_jax.engine.policies.base import Entry, Lcfs, Load, Policy
from multilora_jax.engine.policies.choice import POLICIES, PolicyConfig, make_policy

__all__ = ["POLICIES", "Entry", "Lcfs", "Load", "Policy", "PolicyConfig", "make_policy"]
