"""Runs a single component without writing a topology, for short unit tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.settings import Delivery, Settings
from penstock.testing.doubles import CaptureBolt, FeederSpout
from penstock.testing.runner import LocalRunner
from penstock.topology.builder import TopologyBuilder
from penstock.topology.components import BaseBolt, BaseSpout
from penstock.topology.streams import DEFAULT_STREAM, FieldSpec, OutputDeclarer
from penstock.topology.tuples import Tuple


def run_bolt(
    bolt: BaseBolt,
    fields: Sequence[FieldSpec],
    rows: Iterable[Sequence[Any]],
    *,
    stream: str = DEFAULT_STREAM,
    tick_interval: float | None = None,
    seconds: float = 0.0,
    conf: Mapping[str, Any] | None = None,
) -> list[Tuple]:
    """Feed rows with the given fields to a bolt. Returns the tuples it emitted on ``stream``, in order.

    With ``tick_interval`` and ``seconds``, simulated time passes after the rows, so that the bolt receives ticks.
    An exception of the bolt is raised here.
    """
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout(*fields, rows=rows))
    declarer = builder.set_bolt("bolt", bolt).shuffle_grouping("rows")
    if tick_interval is not None:
        declarer.set_tick_interval(tick_interval)
    return _run(builder, "bolt", bolt, stream, seconds, conf)


def run_spout(
    spout: BaseSpout,
    *,
    stream: str = DEFAULT_STREAM,
    seconds: float = 0.1,
    conf: Mapping[str, Any] | None = None,
) -> list[Tuple]:
    """Let a spout emit for some simulated time. Returns the tuples it emitted on ``stream``, in order."""
    builder = TopologyBuilder()
    builder.set_spout("spout", spout)
    return _run(builder, "spout", spout, stream, seconds, conf, until_idle=False)


def _run(
    builder: TopologyBuilder,
    id: str,
    component: BaseBolt | BaseSpout,
    stream: str,
    seconds: float,
    conf: Mapping[str, Any] | None,
    until_idle: bool = True,
) -> list[Tuple]:
    declared = OutputDeclarer(id)
    component.declare_output_fields(declared)
    captured = stream in declared.streams
    if captured:
        builder.set_bolt("capture", CaptureBolt()).shuffle_grouping(id, stream=stream)
    runner = LocalRunner(builder.build("test", Settings(delivery=Delivery(on_error="stop"), conf=conf or {})))
    if until_idle:
        runner.run_until_idle()
    if seconds:
        runner.run(seconds)
        runner.deactivate()
        runner.run_until_idle()
    return runner.captured("capture") if captured else []
