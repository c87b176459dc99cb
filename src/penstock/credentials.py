"""Secrets that are not written into a topology: ``${NAME}`` stands for an environment variable, ``${file:PATH}``
for the content of a file.

They may stand in connection strings, URLs, options of Kafka and values of ``conf``, and are resolved in the
process that connects. So a secret is in no pickle, state directory or command line; what is stored there is the
reference. Every resolved value is made known to ``penstock.redaction``. ``$${`` stands for ``${`` itself.
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
_PLACEHOLDER = "penstockreference{}x"  # letters and digits only: it passes through any parser as it is
_MOST_BYTES = 65_536  # of a secret's file; the largest are certificates with their chain


def has_references(text: str) -> bool:
    return _REFERENCE.search(text) is not None


def resolved(text: str, where: str) -> str:
    """``text`` with the values in place of the references. Raises ``EnvironmentFault`` where one is missing;
    ``where`` says in it what needs the value."""
    return _replaced(text, lambda name: _value(name, where))


def resolved_url(url: str, where: str) -> str:
    """The same for a URL whose parts are percent-decoded by who reads it: values inside the URL are encoded. A
    URL that is one reference altogether is taken as it is."""
    if (alone := _REFERENCE.fullmatch(url)) is not None and alone[2]:
        return resolved(url, where)
    return _replaced(url, lambda name: quote(_value(name, where), safe=""))


def resolved_values(values: Any, where: str) -> Any:
    """Mappings, lists and tuples with every text in them resolved; other values as they are."""
    if isinstance(values, str):
        return resolved(values, where)
    if isinstance(values, Mapping):
        return {key: resolved_values(value, where) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(resolved_values(value, where) for value in values)
    return values


class Placeholders:
    """A text with placeholders instead of references, for a parser; ``resolve`` puts the values into what was
    parsed. So a value may have characters that the parser would act upon."""

    def __init__(self, text: str) -> None:
        self._names: list[str] = []
        self.text = _replaced(text, self._placeholder)

    def _placeholder(self, name: str) -> str:
        self._names.append(name)
        return _PLACEHOLDER.format(len(self._names) - 1)

    def resolve(self, parsed: Any, where: str) -> Any:
        """A parsed value: one that is not a text is returned as it is."""
        return self._put_in(parsed, lambda name: _value(name, where))

    def show(self, parsed: Any) -> Any:
        """The same with the references as they were written."""
        return self._put_in(parsed, lambda name: f"${{{name}}}")

    def _put_in(self, parsed: Any, value: Callable[[str], str]) -> Any:
        if isinstance(parsed, str):
            for number, name in enumerate(self._names):
                placeholder = _PLACEHOLDER.format(number)
                if placeholder in parsed:
                    parsed = parsed.replace(placeholder, value(name))
        return parsed


def literal_secrets(assignments: Iterable[str]) -> list[str]:
    """The keys of ``KEY=VALUE`` texts whose value shows a secret: on a command line every user can read it. A
    reference shows none, but the same value may also have a secret written out."""
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
            text = file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(
            where,
            f"the file {path} cannot be read on this node ({type(error).__name__}: "
            f"{getattr(error, 'strerror', None) or 'not a text'})",
            "Put it there, readable by the user that the workers run as.",
        ) from error
    if len(text) > _MOST_BYTES:
        raise EnvironmentFault(
            where, f"the file {path} has more than {_MOST_BYTES} characters, too many for a secret"
        )
    return text.rstrip("\r\n")
