"""The tables of the live view, whatever the data."""

from rich.console import Console

from penstock.cli.view import component_table, result_table
from penstock.metrics.bus import ComponentView


def text_of(table):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_a_component_with_everything_and_one_with_nothing():
    busy = ComponentView("split", 2, 1234.5, 9876.5, 17, 2.5e-6, 0.0066, 0.0147, 3, "ValueError", 10, 20)
    fresh = ComponentView("count", 1, 0.0, 0.0, 0, None, None, None, 0, "", 0, 0)
    shown = text_of(component_table("word-count", [busy, fresh]))
    for part in ("word-count", "split", "1,234", "9,876", "17", "2.5 us", "6.6 ms", "14.7 ms", "3"):
        assert part in shown
    assert "-" in shown


def test_acks_and_state_are_shown_where_there_are_any():
    spout = ComponentView("lines", 1, 0, 50.0, 0, None, 0.004, 0.01, 0, "", 10, 20, 1_500, 7)
    count = ComponentView("count", 1, 50.0, 0, 0, None, 0.004, 0.01, 0, "", 10, 20, 0, 0, 12_345, 2_500_000)
    shown = text_of(component_table("word-count", [spout, count]))
    for part in ("acked", "1,500", "failed", "7", "state", "12,345 keys, 2 MB"):
        assert part in shown


def test_values_that_look_like_markup_are_shown_as_they_are():
    shown = text_of(result_table("[bold]", [["[/api/users]", 1000], ["[red]", "x"]]))
    for part in ("[bold]", "[/api/users]", "1,000", "[red]"):
        assert part in shown
