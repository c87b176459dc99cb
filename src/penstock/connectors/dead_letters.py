"""Stores a dead letter for a tuple that has failed too often, for spouts without replay queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import ComponentError, PenstockError
from penstock.topology.components import Context, Failure


def give_up(context: Context, values: Sequence[Any], failure: Failure) -> bool:
    """Store a tuple as a dead letter and report it. Returns False if it cannot be stored at present; this is
    reported, and the spout must keep the tuple."""
    where = f"component '{context.component}' (task {context.task})"
    try:
        context.add_dead_letters([values], failure)
    except (OSError, PenstockError) as error:
        context.report(
            ComponentError(
                where,
                f"a tuple failed {failure.attempts} times, and its dead letter cannot be stored: {error}",
                "The tuple is emitted again until the state directory can be written to.",
            )
        )
        return False
    context.report(
        ComponentError(
            where,
            f"a tuple failed {failure.attempts} times: {failure.error}",
            f"It is a dead letter now: penstock dlq list --topology {context.topology}.",
        )
    )
    return True
