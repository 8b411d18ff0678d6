"""Names of adapters: which can be one, and what is said of one that nobody has."""

from __future__ import annotations

import difflib
import itertools

from multilora_jax.errors import NotFoundError, UserError

MAX_NAME_LENGTH = 256
MAX_NAMES_SHOWN = 20
"""Most valid names that an error lists."""
_MAX_NAMES_COMPARED = 1000


def check_name(name: str) -> None:
    """Raises UserError unless `name` can be an adapter's: at most MAX_NAME_LENGTH printable characters."""
    if not isinstance(name, str):
        raise UserError(
            f"lora_name must be a text, not {type(name).__name__}", reason="bad_lora_name", param="lora_name"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(
            f"lora_name has {len(name)} characters, at most {MAX_NAME_LENGTH} are allowed",
            reason="bad_lora_name", param="lora_name",
        )  # fmt: skip
    if not name.isprintable():
        raise UserError(f"lora_name {name!r} holds control characters", reason="bad_lora_name", param="lora_name")


def unknown_adapter(name: str, names: list[str], param: str | None) -> NotFoundError:
    """The error about a name that does not exist for whom it is told: it says which do, some of them, and the closest.

    Args:
        name: as it was asked for.
        names: those that there are.
        param: the field at fault.
    """
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    # Comparing is costly, and holds the interpreter: not for very many or very long names.
    compared = itertools.islice(names, _MAX_NAMES_COMPARED) if len(name) <= MAX_NAME_LENGTH else ()
    close = difflib.get_close_matches(name, compared, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    shortened = name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 3] + "..."
    error = NotFoundError(
        f"there is no model or adapter {shortened!r}.{hint} Available: {shown or 'none'}{more}.",
        reason="unknown_adapter", param=param,
    )  # fmt: skip
    error.name = name
    return error
