"""The bodies of the routes that load, unload, pin and check adapters."""

from __future__ import annotations

from pydantic import field_validator

from multilora_jax.errors import UserError
from multilora_jax.lora.names import MAX_NAME_LENGTH, check_name
from multilora_jax.server.protocol import Body


class AdapterBody(Body):
    """The routes that are about one adapter: unload, pin, unpin."""

    lora_name: str

    @field_validator("lora_name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.strip():
            raise UserError("lora_name is empty", reason="empty_lora_name", param="lora_name")
        if len(name) > MAX_NAME_LENGTH:
            check_name(name)
        return name


class PathBody(Body):
    """POST /v1/validate_lora_adapter."""

    lora_path: str

    @field_validator("lora_path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if not path.strip():
            raise UserError("lora_path is empty", reason="empty_lora_path", param="lora_path")
        return path


class LoadBody(AdapterBody, PathBody):
    """POST /v1/load_lora_adapter."""

    load_inplace: bool = False
    pinned: bool = False
