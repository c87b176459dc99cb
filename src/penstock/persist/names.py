"""Makes names safe for use in keys and file names."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

_MOST = 100  # characters; two names and a prefix fit into a key of memcached (250) and into a file name


def safe(name: str) -> str:
    """The name with only letters, digits and ``_.-~%``. Different names give different results. A long name is
    shortened and ends with a digest."""
    quoted = quote(name, safe="")
    if len(quoted) <= _MOST:
        return quoted
    return f"{quoted[: _MOST - 33]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
