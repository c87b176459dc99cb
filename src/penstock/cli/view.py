"""The output of ``penstock run``: a live table on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import Terminal
from penstock.driver.internals import Internals
from penstock.metrics.bus import ComponentView
from penstock.redaction import printable
from penstock.spark.session import say_through

_ERRORS_SHOWN = 5  # newest errors in one block of plain lines
_WIDE = 240  # characters of a line in a file or pipe: enough for all columns
_PLAIN_INTERVAL = 2.0  # seconds between two blocks of plain lines, so that a log does not grow too fast


class View(Protocol):
    """Shows a running topology. ``penstock run`` calls ``update`` ten times a second."""

    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, running: Internals, elapsed: float) -> None: ...


def make_view(console: Console, plain: bool) -> View:
    return PlainView(console) if plain or not console.is_terminal else LiveView(console)


def wide_console() -> Console:
    """A console for tables. In a file or pipe it is wide enough that no column is truncated."""
    return Terminal() if sys.stdout.isatty() else Terminal(width=_WIDE)


class LiveView:
    """Redraws one screen. At the top a fixed number of lines shows what runs, how to end it, the last decision and
    the newest error; below are a table with fixed column widths and, as far as the terminal has room, published
    results. Output of Spark and of the user's ``print`` scrolls by above the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._error, self._errors = "", 0

    def __enter__(self) -> LiveView:
        say_through(lambda line: self._console.print(plain_text(line)))
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, running: Internals, elapsed: float) -> None:
        for self._error in running.bus.take_errors():
            self._errors += 1
        title = f"{running.topology.name}  {running.state}  {duration(elapsed)}  restarts {running.restarts}"
        if running.committed:
            title += f"  epoch {running.committed}{age(running.commit_age)}"
        self._live.update(
            screen(
                title,
                _newest(running),
                f"{self._errors:,} errors, the last: {printable(self._error)}" if self._errors else "",
                running.bus.view(),
                running.bus.published(),
                self._console.size,
            )
        )


def screen(
    title: str,
    decision: str,
    error: str,
    views: Sequence[ComponentView],
    published: Mapping[str, Sequence[Sequence[Any]]],
    size: ConsoleDimensions,
) -> Group:
    """The live view on a terminal of this size. The number of lines above the table is always the same, so that
    nothing moves when an error arrives."""
    room = max(
        1, size.height - 7
    )  # rows of the table: the height minus the lines above, the header and the cursor
    wide = max(1, size.width)
    shown, hidden = (views, 0) if len(views) <= room else (views[: room - 1], len(views) - room + 1)
    parts: list[RenderableType] = [
        line(title, "bold"),
        line(
            "Press Ctrl-C to end it after tuples in flight are processed; press it again to end it at once", "dim"
        ),
        line(decision or "no decisions", "yellow" if decision else "dim"),
        line(error[:wide] or "no errors", "red" if error else "dim"),
        line(error[wide:], "red"),  # the first line mostly holds the error's location, this one its cause
        live_table(shown, size.width),
    ]
    if hidden:
        parts.append(line(f"… and {hidden} more components; penstock status shows all", "dim"))
    left = room - len(views)
    for component, rows in published.items():
        if left < 2:
            break
        parts.append(line(component, "italic"))
        parts += [line("  " + "  ".join(_cell(value) for value in row)) for row in rows[: left - 1]]
        left -= 1 + len(rows[: left - 1])
    return Group(*parts)


_COLUMNS = {"tasks": 5, "in/s": 9, "out/s": 9, "queue": 9, "p99": 9, "failed": 7, "errors": 6}
"""Column widths in characters, so that no number is ever truncated."""
_DROPPED = ("tasks", "failed", "p99", "out/s", "queue", "errors", "in/s")
"""The order in which columns are left out on a terminal narrower than 80 characters."""
_NAMED = 16  # width of the component's name on a terminal of 80 characters: what the other columns leave


def live_table(views: Sequence[ComponentView], width: int) -> Table:
    """A table with fixed column widths, 80 characters in total; a wider terminal gives more room to the names. On
    a narrower one whole columns are left out, because a truncated number would be a wrong number."""
    columns = dict(_COLUMNS)
    for name in _DROPPED:
        if _NAMED + 1 + sum(columns.values()) + len(columns) > width:
            del columns[name]
    table = Table(box=None, padding=(0, 1, 0, 0), expand=False, show_edge=False)
    named = min(_NAMED, max(1, width - 1)) + min(max(0, width - 80), 24)
    table.add_column("component", width=named, no_wrap=True, overflow="ellipsis")
    for name, characters in columns.items():
        table.add_column(name, width=characters, justify="right", no_wrap=True, overflow="crop")
    for view in views:
        full = bool(view.capacity) and view.queued > 0.8 * view.capacity
        cells: dict[str, RenderableType] = {
            "tasks": str(view.tasks),
            "in/s": compact(view.rate_in),
            "out/s": compact(view.rate_out),
            "queue": Text(compact(view.queued), style="yellow" if full or math.isfinite(view.limit) else ""),
            "p99": latency(view.latency_p99),
            "failed": Text(compact(view.failed), style="red" if view.failed else ""),
            "errors": Text(brief(view.errors), style="red" if view.errors else ""),
        }
        table.add_row(plain_text(view.component), *(cells[name] for name in columns))
    return table


def line(text: str, style: str = "") -> Text:
    """One line of text, truncated at the terminal's edge."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def plain_text(text: object) -> Text:
    """Text from users and remote processes, without markup and control characters."""
    return Text(printable(str(text)))


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _newest(running: Internals) -> str:
    """The newest decision of any kind."""
    found = [
        (each.time, f"{kind}: {each.text}")
        for kind, decisions in (
            ("data migration", running.migrations.decisions),
            ("scaling", running.scalings.decisions),
            ("refit", running.refits.decisions),
            ("placement", running.placements.decisions),
        )
        for each in list(decisions)[-1:]
    ]
    found += [(each.time, f"replaced: {each}") for each in running.replacements[-1:]]
    found += [(each.time, f"{each.kind}: {each.text}") for each in running.bus.notes()[-1:]]
    return max(found, default=(0.0, ""))[1]


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

    def update(self, running: Internals, elapsed: float) -> None:
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
                line += f" limited to {number(view.limit)}/s"
            if view.acked or view.failed:
                line += f" acked {view.acked} failed {view.failed}"
            if view.state_keys:
                line += f" state {_keys(view.state_keys)} {size(view.state_bytes)}"
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
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def component_table(title: str, views: Sequence[ComponentView]) -> Table:
    table = Table(title=plain_text(title), title_justify="left", expand=False)
    table.add_column("component")
    tracked, stateful = any(v.acked or v.failed for v in views), any(v.state_keys for v in views)
    slowed = any(math.isfinite(v.limit) for v in views)
    names = ["tasks", "in/s", "out/s", "queue", "execute", "p50", "p99", "errors"]
    for name in names + ["limit/s"] * slowed + ["acked", "failed"] * tracked + ["state"] * stateful:
        table.add_column(name, justify="right")
    for view in views:
        table.add_row(
            plain_text(view.component),
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
            *([f"{_keys(view.state_keys)}, {size(view.state_bytes)}"] if stateful else []),
        )
    return table


def result_table(component: str, rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(title=plain_text(component), title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*(plain_text(_cell(value)) for value in row))
    return table


def summary(running: Internals, elapsed: float, draining: float) -> str:
    """What the topology did from start to end. The spouts emitted for ``elapsed`` seconds; processing the tuples
    in flight and stopping took another ``draining`` seconds."""
    restarts = f"{running.restarts} restart{'' if running.restarts == 1 else 's'}"
    lines = [f"{running.topology.name} ran {elapsed:.1f} s and took {draining:.1f} s to end, {restarts}"]
    if running.committed:
        lines[0] += f", epoch {running.committed} committed"
    for component, total in running.bus.totals().items():
        p50, p99 = total.latency.percentile(0.5), total.latency.percentile(0.99)
        latency = f"  latency p50 {millis(p50)} p99 {millis(p99)}" if p50 is not None else ""
        lines.append(
            f"  {component:<16} executed {total.executed:,}  emitted {total.emitted:,}"
            f"  errors {total.errors}{latency}"
            + (f"  acked {total.acked:,}  failed {total.failed:,}" if total.acked or total.failed else "")
            + (f"  late {total.late:,}" if total.late else "")
        )
        if total.last_error:
            lines.append(f"    last error: {total.last_error}")
    for component, rows in running.bus.published().items():
        lines.append(f"  {component}: " + ", ".join(" ".join(str(value) for value in row) for row in rows))
    return printable("\n".join(lines), multiline=True)


def queue(view: ComponentView) -> str:
    """The length and, if there is one, the capacity."""
    return number(view.queued) + (f"/{number(view.capacity)}" if view.capacity else "")


def number(value: float) -> str:
    return f"{value:,.0f}"


def compact(value: float) -> str:
    """A number in at most seven characters."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.4g}{name}" if value < 999.5 * unit else f"{value / unit:,.0f}{name}"
    return number(value)


def brief(value: float) -> str:
    """A number in at most six characters; numbers below 100,000 are exact."""
    return number(value) if value < 99_999.5 else compact(value) if value >= 1e6 else f"{value / 1e3:.0f}k"


def latency(seconds: float | None) -> str:
    """A latency in at most nine characters."""
    if seconds is None or seconds < 0.99995:
        return millis(seconds)
    return f"{seconds:.2f} s" if seconds < 99.995 else f"{seconds:,.0f} s"


def age(seconds: float | None) -> str:
    """The age of the last commit in parentheses; empty if unknown."""
    return "" if seconds is None else f" ({duration(seconds)} ago)"


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
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


def _keys(count: int) -> str:
    return f"{number(count)} key" + ("" if count == 1 else "s")
