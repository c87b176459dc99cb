"""References to secrets: ``${NAME}`` is replaced by an environment variable, ``${file:PATH}`` by the content of a
file.

References may occur in connection strings, URLs, Kafka options and values of ``conf``. They are resolved in the
process that connects, so pickles, state directories and command lines contain the reference and not the secret.
Every resolved value is passed to ``penstock.redaction``. ``$${`` is written for a literal ``${``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from penstock.errors import EnvironmentFault
from penstock.redaction import HIDDEN, hide, redacted

_REFERENCE = re.compile(r"\$(\$\{|\{(file:[^}\s]+|[A-Za-z_][A-Za-z0-9_]*)\})")
_QUOTED_REFERENCE = re.compile(rf"(['\"]){re.escape(HIDDEN)}\1")
_PLACEHOLDER = "penstockreference{}x"  # letters and digits only, so that it passes through any parser unchanged
_MAX_BYTES = 65_536  # of a file with a secret; the largest are certificates with their chain


def has_references(text: str) -> bool:
    return _REFERENCE.search(text) is not None


def resolved(text: str, where: str) -> str:
    """Replace the references in ``text`` by their values. Raises ``EnvironmentFault`` if one is missing; ``where``
    names what needs the value."""
    return _replaced(text, lambda name: _value(name, where))


def resolved_url(url: str, where: str) -> str:
    """``resolved`` for a URL whose reader percent-decodes its parts: values inside the URL are encoded. The value
    of a URL that consists of a single reference is used unchanged."""
    if (alone := _REFERENCE.fullmatch(url)) is not None and alone[2]:
        return resolved(url, where)
    return _replaced(url, lambda name: quote(_value(name, where), safe=""))


def resolved_values(values: Any, where: str) -> Any:
    """Resolve every text in mappings, lists and tuples. Other values are returned unchanged."""
    if isinstance(values, str):
        return resolved(values, where)
    if isinstance(values, Mapping):
        return {key: resolved_values(value, where) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(resolved_values(value, where) for value in values)
    return values


class Placeholders:
    """Replaces references in a text by placeholders before it is parsed; ``resolve`` inserts the values into the
    parsed result. A value may therefore contain characters that are special to the parser."""

    def __init__(self, text: str) -> None:
        self._names: list[str] = []
        self.text = _replaced(text, self._placeholder)

    def _placeholder(self, name: str) -> str:
        self._names.append(name)
        return _PLACEHOLDER.format(len(self._names) - 1)

    def resolve(self, parsed: Any, where: str) -> Any:
        """Insert the values into a parsed value. Values other than texts are returned unchanged."""
        return self._put_in(parsed, lambda name: _value(name, where))

    def show(self, parsed: Any) -> Any:
        """Insert the references as they were written."""
        return self._put_in(parsed, lambda name: f"${{{name}}}")

    def _put_in(self, parsed: Any, value: Callable[[str], str]) -> Any:
        if isinstance(parsed, str):
            for number, name in enumerate(self._names):
                placeholder = _PLACEHOLDER.format(number)
                if placeholder in parsed:
                    parsed = parsed.replace(placeholder, value(name))
        return parsed


def literal_secrets(assignments: Iterable[str]) -> list[str]:
    """The keys of ``KEY=VALUE`` texts whose value contains a literal secret, which every user could read on a
    command line. A reference is not a secret, but the same value may contain both."""
    found = []
    for text in assignments:
        key, _, value = text.partition("=")
        shown = f"{key}={_QUOTED_REFERENCE.sub(HIDDEN, _REFERENCE.sub(_hidden_reference, value))}"
        if redacted(shown) != shown:
            found.append(key)
    return found


def _hidden_reference(found: re.Match[str]) -> str:
    return HIDDEN if found[2] else "${"


def _replaced(text: str, value: Callable[[str], str]) -> str:
    return _REFERENCE.sub(lambda found: value(found[2]) if found[2] else "${", text)


def _value(name: str, where: str) -> str:
    value = _from_file(name.removeprefix("file:"), where) if name.startswith("file:") else os.environ.get(name)
    if value is None:
        raise EnvironmentFault(
            where,
            f"the environment variable {name} is not set in this process",
            f"Set {name} where Spark's workers start, or use ${{file:PATH}} with a file that every node has.",
        )
    hide(value)
    return value


def _from_file(path: str, where: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(
            where,
            f"the file {path} cannot be read on this node ({type(error).__name__}: "
            f"{getattr(error, 'strerror', None) or 'not a text'})",
            "Create it, readable by the user that runs the workers.",
        ) from error
    if len(text) > _MAX_BYTES:
        raise EnvironmentFault(
            where, f"the file {path} has more than {_MAX_BYTES} characters, too many for a secret"
        )
    return text.rstrip("\r\n")
