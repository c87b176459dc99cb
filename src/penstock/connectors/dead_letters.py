"""What spouts without replay queues do with a tuple that has failed too often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import ComponentError, PenstockError
from penstock.topology.components import Context, Failure


def give_up(context: Context, values: Sequence[Any], failure: Failure) -> bool:
    """Make a dead letter of a tuple. False: that cannot be stored now, which is reported; the tuple must stay with
    the spout."""
    where = f"component '{context.component}' (task {context.task})"
    try:
        context.add_dead_letters([values], failure)
    except (OSError, PenstockError) as error:
        context.report(
            ComponentError(
                where,
                f"a tuple cannot be given up, because its dead letter cannot be stored: {error}",
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
