"""User errors with their story: which component, which line of the user's, on which tuple."""

from __future__ import annotations

import os
import sysconfig
import traceback

from penstock.errors import ComponentError, PenstockError, UserCodeError
from penstock.topology.tuples import Tuple

_NOT_THE_USERS = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_LONGEST_REPR = 200  # characters of a tuple in an error text


def user_line(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame of the user's own, or an empty text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not os.path.realpath(frame.filename).startswith(_NOT_THE_USERS) and frame.filename[0] != "<":
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def blame(component: str, call: str, error: Exception, tup: Tuple | None = None) -> PenstockError:
    """The error as the user should read it. Errors of Penstock's own keep their kind and gain the line."""
    line = user_line(error)
    if isinstance(error, PenstockError):
        where = error.where if component in error.where else f"component '{component}', {error.where}"
        if line and line not in where:
            where += f" ({line})"
        kind = type(error) if isinstance(error, ComponentError) else ComponentError
        return kind(where, error.rule, error.got, error.way_out)
    got = f"{type(error).__name__}: {error}"
    if tup is not None:
        shown = repr(tup)
        got += f", on {shown[:_LONGEST_REPR]}{'…' if len(shown) > _LONGEST_REPR else ''}"
    return UserCodeError(
        f"component '{component}'" + (f" ({line})" if line else ""), f"{call} must not raise", got
    )
