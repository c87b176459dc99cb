"""Opens the file system behind a path or an fsspec URL. Its password may be a reference
(``penstock.credentials``)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import fsspec
import fsspec.core

from penstock.credentials import Placeholders, has_references, resolved
from penstock.redaction import hide


def open_url(url: str) -> tuple[Any, str]:
    """The file system and the path in it. Raises the errors of ``fsspec.core.url_to_fs``, and ``EnvironmentFault``
    if a reference cannot be resolved."""
    where = f"file system {url}"
    if not has_references(url):
        _hide_password(url)
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    if "://" not in url or "::" in url or url.startswith("${"):
        return fsspec.core.url_to_fs(resolved(url, where))  # type: ignore[no-any-return]
    # fsspec does not percent-decode URLs, so values are inserted after the URL was parsed.
    parts = Placeholders(url)
    protocol = url.partition("://")[0]
    kind = fsspec.get_filesystem_class(protocol)
    options = {name: parts.resolve(value, where) for name, value in kind._get_kwargs_from_urls(parts.text).items()}
    return fsspec.filesystem(protocol, **options), parts.resolve(kind._strip_protocol(parts.text), where)


def _hide_password(url: str) -> None:
    try:
        password = urlsplit(url).password
    except ValueError:
        return
    if password:
        hide(password)
