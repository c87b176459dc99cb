"""Operators' requests to a running topology. Each uses a connection of its own, with one request and one
answer."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class OperatorRequest(Struct, frozen=True, tag=True, array_like=True):
    """A request of an operator; the only message that an operator's connection sends."""

    name: str
    arguments: dict[str, Any] = {}
    """Checked by the code that carries out the request."""


class OperatorAnswer(Struct, frozen=True, tag=True, array_like=True):
    """The result of a request."""

    text: str
    error: list[str] = []
    """The parts of the error if the request was refused or failed; otherwise empty."""
    kind: str = "SettingError"
    """The class name of the error."""
