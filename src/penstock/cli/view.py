"""What ``penstock run`` shows: a live table on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.metrics.bus import ComponentView
from penstock.spark.session import say_through
from penstock.spark.supervisor import RunningTopology

_ERRORS_SHOWN = 5
_WIDE = 240  # characters of a line in a file or pipe
_PLAIN_INTERVAL = 2.0  # seconds between two blocks of plain lines


class View(Protocol):
    """Shows a running topology; ``update`` is called a few times a second."""

    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, running: RunningTopology, elapsed: float) -> None: ...


def make_view(console: Console, plain: bool) -> View:
    return PlainView(console) if plain or not console.is_terminal else LiveView(console)


def wide_console() -> Console:
    """For tables: where nobody looks at it, no column needs to be cut."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


class LiveView:
    """Redraws one table; what Spark or a user's ``print`` says scrolls by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._errors: deque[str] = deque(maxlen=_ERRORS_SHOWN)

    def __enter__(self) -> LiveView:
        say_through(lambda line: self._console.print(Text(line)))
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, running: RunningTopology, elapsed: float) -> None:
        self._errors.extend(running.bus.take_errors())
        title = f"{running.topology.name}  {running.state}  {elapsed:.0f} s"
        if running.committed:
            title += f"  epoch {running.committed} committed"
        if running.restarts:
            title += f"  restarts {running.restarts}"
        parts: list[RenderableType] = [component_table(title, running.bus.view())]
        for component, rows in running.bus.published().items():
            parts.append(result_table(component, rows))
        if decisions := running.migrations.decisions:
            parts.append(Text(f"data migration: {decisions[-1].text}", style="yellow"))
        if decided := running.scalings.decisions:
            parts.append(Text(f"scaling: {decided[-1].text}", style="yellow"))
        if placed := running.placements.decisions:
            parts.append(Text(f"placement: {placed[-1].text}", style="yellow"))
        if done := running.replacements:
            parts.append(Text(f"replaced {len(done)} ×, last: {done[-1]}", style="yellow"))
        parts += [Text(error, style="red") for error in self._errors]
        parts.append(Text("Ctrl-C ends the topology", style="dim"))
        self._live.update(Group(*parts))


class PlainView:
    """A block of lines every two seconds, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due = 0.0
        self._replaced = 0

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, running: RunningTopology, elapsed: float) -> None:
        if elapsed < self._due:
            return
        self._due = elapsed + _PLAIN_INTERVAL
        for view in running.bus.view():
            line = (
                f"{elapsed:6.1f}s {view.component:<16} in {number(view.rate_in)}/s out {number(view.rate_out)}/s "
                f"queue {queue(view)} execute {micros(view.execute_time)} "
                f"p50 {millis(view.latency_p50)} p99 {millis(view.latency_p99)} errors {view.errors}"
            )
            if math.isfinite(view.limit):
                line += f" held to {number(view.limit)}/s"
            if view.acked or view.failed:
                line += f" acked {view.acked} failed {view.failed}"
            if view.state_keys:
                line += f" state {view.state_keys} keys {size(view.state_bytes)}"
            self._print(line)
        for done in running.replacements[self._replaced :]:
            self._print(f"{elapsed:6.1f}s replaced: {done}")
        self._replaced = len(running.replacements)
        if running.committed:
            self._print(f"{elapsed:6.1f}s epoch {running.committed} committed")
        for component, rows in running.bus.published().items():
            shown = "  ".join("=".join(str(value) for value in row) for row in rows)
            self._print(f"{elapsed:6.1f}s {component}: {shown}")
        for error in running.bus.take_errors()[-_ERRORS_SHOWN:]:
            self._print(f"{elapsed:6.1f}s error: {error}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def component_table(title: str, views: Sequence[ComponentView]) -> Table:
    table = Table(title=Text(title), title_justify="left", expand=False)
    table.add_column("component")
    tracked, stateful = any(v.acked or v.failed for v in views), any(v.state_keys for v in views)
    slowed = any(math.isfinite(v.limit) for v in views)
    names = ["tasks", "in/s", "out/s", "queue", "execute", "p50", "p99", "errors"]
    for name in names + ["held to/s"] * slowed + ["acked", "failed"] * tracked + ["state"] * stateful:
        table.add_column(name, justify="right")
    for view in views:
        table.add_row(
            Text(view.component),
            str(view.tasks),
            number(view.rate_in),
            number(view.rate_out),
            Text(queue(view), style="yellow" if view.capacity and view.queued > 0.8 * view.capacity else ""),
            micros(view.execute_time),
            millis(view.latency_p50),
            millis(view.latency_p99),
            Text(str(view.errors), style="red" if view.errors else ""),
            *([Text(number(view.limit), style="yellow") if math.isfinite(view.limit) else "-"] if slowed else []),
            *([number(view.acked), number(view.failed)] if tracked else []),
            *([f"{number(view.state_keys)} keys, {size(view.state_bytes)}"] if stateful else []),
        )
    return table


def result_table(component: str, rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(title=Text(component), title_justify="left", show_header=False)
    for row in rows:  # Text: a user's value may look like markup
        table.add_row(*(Text(f"{value:,}" if isinstance(value, int) else str(value)) for value in row))
    return table


def summary(running: RunningTopology, elapsed: float) -> str:
    """What the topology did, from start to end."""
    lines = [f"{running.topology.name} ran {elapsed:.1f} s, {running.restarts} restarts"]
    if running.committed:
        lines[0] += f", epoch {running.committed} committed"
    for component, total in running.bus.totals().items():
        p50, p99 = total.latency.percentile(0.5), total.latency.percentile(0.99)
        latency = f"  latency p50 {millis(p50)} p99 {millis(p99)}" if p50 is not None else ""
        lines.append(
            f"  {component:<16} executed {total.executed:,}  emitted {total.emitted:,}"
            f"  errors {total.errors}{latency}"
            + (f"  acked {total.acked:,}  failed {total.failed:,}" if total.acked or total.failed else "")
        )
        if total.last_error:
            lines.append(f"    last error: {total.last_error}")
    for component, rows in running.bus.published().items():
        lines.append(f"  {component}: " + ", ".join(" ".join(str(value) for value in row) for row in rows))
    return "\n".join(lines)


def queue(view: ComponentView) -> str:
    """Length and, where there is one, capacity."""
    return number(view.queued) + (f"/{number(view.capacity)}" if view.capacity else "")


def number(value: float) -> str:
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """The two largest units of it."""
    whole = int(seconds)
    for unit, name, lower, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // lower} {rest}"
    return f"{whole} s"


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def millis(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def micros(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.1f} us"
