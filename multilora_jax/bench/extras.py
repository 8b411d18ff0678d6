"""Packages that only some commands need: said to be missing in one line, before anything is measured."""

from __future__ import annotations

import importlib.util

from multilora_jax.errors import ConfigError


def require(package: str, extra: str, param: str) -> None:
    """Raises ConfigError where a package of an optional extra is not installed.

    Args:
        package: as it is imported.
        extra: what installs it: pip install 'multilora_jax[EXTRA]'.
        param: the flag or command that needs it.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{param}: {package} is not installed: pip install 'multilora_jax[{extra}]'",
            reason="missing_package", param=param,
        )  # fmt: skip
