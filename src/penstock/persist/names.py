"""Names as parts of keys and file names."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

_MOST = 100  # characters of a part: two of them and some more fit into memcached's 250, and into a file name


def safe(name: str) -> str:
    """A name of any characters as letters, digits and ``_.-~%`` only; different ones for different names. A long
    one is cut, and told from others by a digest."""
    quoted = quote(name, safe="")
    if len(quoted) <= _MOST:
        return quoted
    return f"{quoted[: _MOST - 33]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
