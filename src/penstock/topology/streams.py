"""Streams, that is triples of component id, stream id and fields, and the declarer with which components declare
them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import TopologyError

DEFAULT_STREAM = "default"
SYSTEM_COMPONENT = "__system"
TICK_STREAM = "__tick"

FieldSpec = str | tuple[str, type | pa.DataType]

_ARROW_TYPES: dict[type, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}

# Attributes of Tuple. A field with such a name could not be read as an attribute.
RESERVED_FIELDS = frozenset({"fields", "value", "source_component", "source_stream", "source_task", "is_tick"})


@dataclass(frozen=True)
class Field:
    """One field of a stream. If ``type`` is None, the type is inferred for each frame from its values."""

    name: str
    type: pa.DataType | None = None


@dataclass(frozen=True)
class Stream:
    """One output stream that a component declared."""

    component: str
    name: str
    fields: tuple[Field, ...]
    direct: bool = False

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    def __str__(self) -> str:
        return self.component if self.name == DEFAULT_STREAM else f"{self.component}:{self.name}"


class OutputDeclarer:
    """Passed to ``declare_output_fields``, once per component, while the topology is built."""

    def __init__(self, component: str) -> None:
        self._component = component
        self.streams: dict[str, Stream] = {}

    def declare(self, *fields: FieldSpec, stream: str = DEFAULT_STREAM, direct: bool = False) -> None:
        """Declare one stream. A field is a name, or a pair of name and type such as ``("count", int)``. Raises
        ``TopologyError``."""
        where = f"component '{self._component}', stream '{stream}'"
        if stream in self.streams:
            raise TopologyError(where, "it is declared twice", "Drop one of the declarations.")
        if not fields:
            raise TopologyError(where, "it has no field", 'Name at least one: declare("word", "count").')
        parsed = tuple(_field(where, spec) for spec in fields)
        names = [field.name for field in parsed]
        for name in names:
            if names.count(name) > 1:
                raise TopologyError(where, f"it has two fields '{name}'", "Rename one of them.")
        self.streams[stream] = Stream(self._component, stream, parsed, direct)


def _field(where: str, spec: FieldSpec) -> Field:
    if isinstance(spec, tuple) and len(spec) != 2:
        raise TopologyError(
            where,
            f"{spec!r} is not a field: a field is a name or a pair of name and type",
            'For example ("count", int).',
        )
    name, kind = spec if isinstance(spec, tuple) else (spec, None)
    if not isinstance(name, str) or not name:
        raise TopologyError(
            where, f"{name!r} is not a field's name: a name is a non-empty text", "Give it a name."
        )
    if name in RESERVED_FIELDS or name.startswith("__"):
        raise TopologyError(where, f"the field name '{name}' is taken by Tuple itself", "Choose another name.")
    if kind is None or isinstance(kind, pa.DataType):
        return Field(name, kind)
    if not isinstance(kind, type) or kind not in _ARROW_TYPES:
        known = ", ".join(known.__name__ for known in _ARROW_TYPES)
        raise TopologyError(
            where,
            f"the type of field '{name}' is {kind!r}, neither one of {known} nor a pyarrow type",
            "Leave the type out to have it inferred.",
        )
    return Field(name, _ARROW_TYPES[kind])
