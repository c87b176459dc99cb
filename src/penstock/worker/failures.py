"""User errors with their story: which component, which line of the user's, on which tuple."""

from __future__ import annotations

import asyncio
import os
import sysconfig
import traceback

from penstock.errors import ComponentError, PenstockError, UserCodeError
from penstock.redaction import redacted
from penstock.texts import bounded_repr, shortened
from penstock.topology.tuples import Tuple

_NOT_THE_USERS = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_MOST_READ = 100_000  # characters in which passwords are looked for
_MOST_MESSAGE = 2_500  # characters of what user code raised: leaves room for the tuple
_MOST_TUPLE = 1_000  # characters of a tuple in an error text


USER_ERRORS = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""What a component's code may raise at the expense of its own tuple or task only: ``sys.exit()`` in ``execute``
must not end the worker. A ``KeyboardInterrupt`` is not among them: it is somebody's Ctrl-C in a test."""


def user_line(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame of the user's own, or an empty text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not os.path.realpath(frame.filename).startswith(_NOT_THE_USERS) and frame.filename[0] != "<":
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def blame(component: str, call: str, error: BaseException, tup: Tuple | None = None) -> PenstockError:
    """The error as the user should read it. Errors of Penstock's own keep their kind and gain the line."""
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
    """The tuple with each value cut, for one may be a file of many megabytes."""
    if isinstance(tup, Tuple):
        inner = ", ".join(f"{name}={_value(value)}" for name, value in zip(tup.fields, tup, strict=False))
        return shortened(f"Tuple({inner})", _MOST_TUPLE)
    return shortened(f"({', '.join(map(_value, tup))})", _MOST_TUPLE)


def _value(value: object) -> str:
    """Redacted before it is cut: half a password is not found any more."""
    return bounded_repr(redacted(value[:_MOST_READ]) if type(value) is str else value)
