"""Rules for the names that users choose. They become parts of paths, topics, metrics and terminal output."""

from __future__ import annotations

from penstock.errors import TopologyError

LONGEST_NAME = 100
"""In UTF-8 bytes. File systems limit a name to 255 bytes and Kafka a topic to 249, and Penstock joins several
names."""


def check_name(where: str, what: str, name: object) -> None:
    """Raise ``TopologyError`` if ``name`` is not valid as a component id, a stream id or a topology name."""
    fits = (
        isinstance(name, str)
        and name.isprintable()
        and name == name.strip()
        and not set(name) & set("/\\:")
        and not name.startswith((".", "__"))
        and 0 < len(name.encode("utf-8", "replace")) <= LONGEST_NAME
    )
    if not fits:
        text = repr(name)
        raise TopologyError(
            where,
            (text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}… ({len(text):,} characters)")
            + (
                f" cannot be {what}, which is a printable text of 1 to {LONGEST_NAME} bytes, "
                "without '/', '\\' and ':', that does not begin or end with a space and does not "
                "begin with '.' or '__'"
            ),
            "Use letters, digits, '-', '_' and '.', for example 'word-count'.",
        )
