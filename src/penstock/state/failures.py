"""Classifies errors of file systems: the file is missing, a retry may help, or a person must act.

The clients of fsspec raise ``OSError`` and exceptions of their own (botocore's ``ClientError``, HTTP errors).
Those with an HTTP status are classified by it. An error that is not known to be permanent counts as temporary: one
more attempt is cheap, and the topology reports that it retries.
"""

from __future__ import annotations

import errno
from typing import Any, Final

from penstock.errors import StateError, StateUnavailable

_HINTS: Final = {
    errno.ENOSPC: "Free some space there, or set delivery.state_dir to a folder that has more.",
    errno.EDQUOT: "Raise the quota, or set delivery.state_dir to a folder that has more.",
    errno.EACCES: "Give this user the right to write there, or set delivery.state_dir to another folder.",
    errno.EPERM: "Give this user the right to write there, or set delivery.state_dir to another folder.",
    errno.EROFS: "Set delivery.state_dir to a folder on a file system that can be written to.",
    errno.ENOENT: "Was the state folder removed? It must stay for as long as its state is of use.",
}

_PERMANENT: Final = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}
    | {errno.EEXIST, errno.EINVAL, errno.ELOOP, errno.ENOTEMPTY, errno.ENOTSUP, errno.ENOSYS}
)
"""Error numbers for which a retry is useless. A full disk is not included, because someone may free space."""

_PERMANENT_TYPES: Final = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)
_MISTAKES: Final = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError, ImportError)
"""Exceptions caused by a wrong URL, a missing package or a bug, not by the store."""

_TEMPORARY_STATUS: Final = frozenset({408, 409, 423, 425, 429})
"""HTTP statuses below 500 for which a retry may help."""


def state_error(where: str, verb: str, error: Exception) -> StateError:
    """The error to raise instead of ``error``: ``StateUnavailable`` if a retry may help, otherwise
    ``StateError``."""
    kind = StateUnavailable if is_passing(error) else StateError
    number = error.errno if isinstance(error, OSError) else None
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return kind(
        where,
        f"the attempt to {verb} it failed ({type(error).__name__}: {message})",
        _HINTS.get(number or 0, "Check the file system behind delivery.state_dir."),
    )


def is_missing(error: StateError) -> bool:
    """Whether the file does not exist, as opposed to being unreadable."""
    cause = error.__cause__
    return isinstance(cause, FileNotFoundError) or (cause is not None and _status(cause) == 404)


def is_passing(error: BaseException) -> bool:
    """Whether a retry may help."""
    if isinstance(error, _PERMANENT_TYPES):
        return False
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _TEMPORARY_STATUS
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT
    return not isinstance(error, _MISTAKES)


def _status(error: BaseException) -> int | None:
    """The HTTP status of a client's exception, if it has one."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(found, int):
            return found
    for source in (error, response):
        for name in ("status", "status_code", "code"):
            found = getattr(source, name, None)
            if isinstance(found, int) and 400 <= found < 600:
                return found
    return None
