"""Finds the output stream on which a component emits, and raises the errors for wrong calls of ``emit``. These
are ``ComponentError``, and its subclass ``FieldCountError`` for a wrong number of values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NoReturn

from penstock.errors import ComponentError, FieldCountError
from penstock.topology.streams import Stream
from penstock.worker.outputs import StreamOutput

Outputs = Mapping[str, StreamOutput]


def named_output(component: str, outputs: Outputs, stream: str) -> StreamOutput:
    output = outputs.get(stream)
    if output is None:
        near = difflib.get_close_matches(stream, outputs, 1)
        raise ComponentError(
            f"component '{component}'",
            f"it emitted on stream '{stream}', which it does not declare (it declares "
            f"{', '.join(outputs) or 'none'})",
            f"Did you mean '{near[0]}'?" if near else "Declare it in declare_output_fields.",
        )
    return output


def direct_output(component: str, outputs: Outputs, stream: str, task: int) -> StreamOutput:
    output = named_output(component, outputs, stream)
    if not output.stream.direct:
        raise ComponentError(
            where(output.stream),
            "emit_direct was called, but the stream is not direct",
            "Declare it with direct=True.",
        )
    if task not in output.direct_targets:
        raise ComponentError(
            where(output.stream),
            f"emit_direct named task {task!r}, which is not a task of a subscriber "
            f"({sorted(output.direct_targets)})",
            "The ids of a component's tasks are in context.tasks.",
        )
    return output


def where(stream: Stream) -> str:
    return f"component '{stream.component}', stream '{stream.name}'"


def direct_only(stream: Stream) -> NoReturn:
    raise ComponentError(
        where(stream),
        "emit was called, but the stream is direct",
        "Call emit_direct(task, values) and name the receiving task.",
    )


def wrong_count(stream: Stream, values: Any) -> NoReturn:
    if isinstance(values, str) or not hasattr(type(values), "__len__"):
        got, hint = f"{values!r} was emitted", f"Wrap it: emit([{values!r}])."
    else:
        got, hint = (
            f"{len(values)} value{' was' if len(values) == 1 else 's were'} emitted: {values!r}",
            "Emit one value per declared field.",
        )
    raise FieldCountError(
        where(stream),
        f"it has {len(stream.fields)} field{'' if len(stream.fields) == 1 else 's'} "
        f"({', '.join(stream.field_names)}), but {got}",
        hint,
    )
