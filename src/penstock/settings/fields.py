"""Declares and checks a single setting."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

from penstock.errors import SettingError

_MISFITS = {int: "not a whole number", float: "not a number", str: "not a text", bool: "neither true nor false"}
"""What errors say of a value that has not the type of the setting."""


def setting(
    default: Any, unit: str, why: str, *, choices: tuple[str, ...] = (), zero: bool = False, most: float = math.inf
) -> Any:
    """Declare a field of a group. ``unit`` may be empty; ``why`` says what the setting does and why it has this
    default; ``choices`` are the permitted values of a text; ``zero``: a number may be 0;
    ``most``: the highest number."""
    return dataclasses.field(
        default=default, metadata={"unit": unit, "why": why, "choices": choices, "zero": zero, "most": most}
    )


def check_value(name: str, spec: dataclasses.Field[Any], value: Any) -> None:
    """Raise ``SettingError`` unless the value has the type and the range of this setting."""
    where, kind, choices = f"setting {name}", _kind(spec), spec.metadata["choices"]
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f"Did you mean {near[0]}?" if near else ""
        raise SettingError(where, f"{value!r} is not one of " + ", ".join(choices), hint)
    fits = isinstance(value, kind) or (kind is float and type(value) is int)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise SettingError(where, f"{value!r} is {_MISFITS[kind]}")
    if kind in (int, float):
        zero = spec.metadata["zero"]
        if not 0 <= value < math.inf or (value == 0 and not zero):
            raise SettingError(where, f"it must be {'at least' if zero else 'greater than'} 0, not {value!r}")
        if value > spec.metadata["most"]:
            raise SettingError(where, f"it must be at most {spec.metadata['most']}, not {value!r}")


def from_text(name: str, spec: dataclasses.Field[Any], text: str) -> Any:
    """Convert a text of the command line to a value of the setting. Raises ``SettingError``."""
    where, kind = f"setting {name}", _kind(spec)
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise SettingError(where, f"{text!r} is {_MISFITS[kind]}")
    try:
        return kind(text)
    except ValueError:
        raise SettingError(where, f"{text!r} is {_MISFITS[kind]}") from None


def _kind(spec: dataclasses.Field[Any]) -> type:
    """The type of a setting is the type of its default."""
    return type(spec.default)


def guess(text: str) -> Any:
    """Convert the text of a user's own value (``conf.NAME=TEXT``) to a number if it looks like one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
