"""What people ask of a running topology: one request and one answer on a connection of its own."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class OperatorRequest(Struct, frozen=True, tag=True, array_like=True):
    """The only message of a connection that is not a worker's."""

    name: str
    arguments: dict[str, Any] = {}
    """Checked by whoever carries out the request."""


class OperatorAnswer(Struct, frozen=True, tag=True, array_like=True):
    """What became of a request."""

    text: str
    error: list[str] = []
    """The parts of the error where the request was refused or failed; else empty."""
    kind: str = "SettingError"
    """The error's class."""
