"""Names that users give: they become parts of paths, topics, metrics and lines of the terminal."""

from __future__ import annotations

from penstock.errors import TopologyError

LONGEST_NAME = 100
"""UTF-8 bytes. File systems allow 255 for a name, Kafka 249 for a topic, and ours contain several names."""


def check_name(where: str, what: str, name: object) -> None:
    """Raises ``TopologyError`` for what cannot be a component's id, a stream's id or a topology's name."""
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
