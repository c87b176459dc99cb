"""Turns an exception of user code into an error that names the component, the line of user code and the tuple."""

from __future__ import annotations

import asyncio
import os
import sysconfig
import traceback

from penstock.errors import ComponentError, PenstockError, UserCodeError
from penstock.redaction import redacted
from penstock.texts import bounded_repr, shortened
from penstock.topology.tuples import Tuple

_LIBRARY_FOLDERS = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_MOST_READ = 100_000
"""Characters of a text that are searched for passwords: bounds the time for an error with a huge message."""
_MOST_MESSAGE = 2_500
"""Characters of the message that user code raised: fits on a screen and leaves room for the tuple."""
_MOST_TUPLE = 1_000
"""Characters of the tuple in an error text: five long values, and with the message still below
``texts.MOST_ERROR``."""

USER_ERRORS = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions of user code that affect only its own tuple or task: ``sys.exit()`` in ``execute`` must not end the
worker. ``KeyboardInterrupt`` is not one of them, because it is a Ctrl-C in a test."""


def user_line(error: BaseException) -> str:
    """``file:line in function`` of the innermost stack frame in user code; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not os.path.realpath(frame.filename).startswith(_LIBRARY_FOLDERS) and frame.filename[0] != "<":
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def blame(component: str, call: str, error: BaseException, tup: Tuple | None = None) -> PenstockError:
    """The error as it is shown to the user. A ``ComponentError`` keeps its class; every error gets the line of
    user code. ``call`` is the name of the method that raised."""
    line = user_line(error)
    if isinstance(error, PenstockError):
        where = error.where if f"'{component}'" in error.where else f"component '{component}', {error.where}"
        if line and line not in where:
            where += f" ({line})"
        kind = type(error) if isinstance(error, ComponentError) else ComponentError
        return kind(where, error.problem, error.hint)
    got = shortened(redacted(shortened(f"{type(error).__name__}: {error}", _MOST_READ)), _MOST_MESSAGE)
    if tup is not None:
        got += f", on {_shown(tup)}"
    return UserCodeError(f"component '{component}'" + (f" ({line})" if line else ""), f"{call} raised {got}")


def _shown(tup: tuple[object, ...]) -> str:
    """The tuple as text. Each value is truncated, because it may have many megabytes."""
    if isinstance(tup, Tuple):
        inner = ", ".join(f"{name}={_value(value)}" for name, value in zip(tup.fields, tup, strict=False))
        return shortened(f"Tuple({inner})", _MOST_TUPLE)
    return shortened(f"({', '.join(map(_value, tup))})", _MOST_TUPLE)


def _value(value: object) -> str:
    """The value as text. Passwords are removed before it is truncated, because a truncated password is not
    recognized."""
    return bounded_repr(redacted(value[:_MOST_READ]) if type(value) is str else value)
