"""*Lu 2020*, figure 13, in the local runner: real workers, acks and flow control on a simulated clock. Channels
fill up as Spark's do, and what a word takes advances the clock: results do not depend on the machine."""

from __future__ import annotations

import argparse
import importlib
from collections import deque
from typing import Any

from benchmarks.harness import Results
from benchmarks.on_off import OVERLOADED, RATE, SYSTEMS, TIME_OUT, UNLIMITED, WORD
from benchmarks.peers.bench import CASES, Case, case_name
from penstock import (
    BasicBolt,
    Collector,
    Conf,
    Context,
    Delivery,
    Failure,
    Flow,
    OutputDeclarer,
    Settings,
    Spout,
    SpoutCollector,
    TopologyBuilder,
    Tuple,
)
from penstock.settings import Workers

WORDS = 11
"""Words of a sentence."""
_SAVED = 0.05  # seconds of its rate that a source may be late


def _simulated() -> Any:
    """The runner whose channels fill up, and its clock; the tests of flow control use them too."""
    return importlib.import_module("tests.consistency.flow_components")


class Numbers(Spout):
    """``RATE`` sentences per second, those that failed first."""

    def __init__(self) -> None:
        self.acked = self.failed = self.next = 0
        self.again: deque[int] = deque()

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("sentence", int))

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector, self._clock = collector, _simulated().CLOCK
        self._last, self._due = self._clock.now(), 0.0

    def next_tuple(self) -> None:
        now = self._clock.now()
        self._due = min(self._due + (now - self._last) * RATE, RATE * _SAVED)
        self._last = now
        if self._due < 1:
            return
        self._due -= 1
        if self.again:
            number = self.again.popleft()
        else:
            number, self.next = self.next, self.next + 1
        self._collector.emit([number], msg_id=number)

    def ack(self, msg_id: Any) -> None:
        self.acked += 1

    def fail(self, msg_id: Any, failure: Failure) -> None:
        self.failed += 1
        self.again.append(msg_id)


class SplitNumbers(BasicBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", int))

    def execute(self, tup: Tuple, collector: Collector) -> None:
        for word in range(WORDS):
            collector.emit([tup[0] * WORDS + word])


class SimulatedCount(BasicBolt):
    """Takes ``seconds`` of the simulated clock for a word."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def prepare(self, conf: Conf, context: Context) -> None:
        self._clock = _simulated().CLOCK

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._clock.advance(self._seconds)


def measure_flow(results: Results, options: argparse.Namespace) -> None:
    """Completed sentences per second in the four cases, in short form the first and the last."""
    seconds, warm_up = (25, 10) if options.quick else (40, 10)
    for case in [CASES[0], CASES[3]] if options.quick else CASES:
        name = case_name(case)
        rates = {}
        for system in SYSTEMS:
            acked, failed = completed(case, system, seconds, options.seed)
            rates[system] = sum(acked[warm_up:]) / len(acked[warm_up:])
            results.row(case=name, system=system, **{"sentences/s": rates[system]}, failed=failed, offered=RATE)
            results.bar(f"rate.{name}.{system}", rates[system], f"completed sentences/s of {RATE}")
            results.bar(f"failed.{name}.{system}", failed, "sentences timed out")
            results.curve(f"{name}.{system}", [second + 1 for second in range(seconds)], acked)
        results.bar(f"on_vs_off.{name}", rates["on"] / max(1.0, rates["off"]), "× completed sentences")
        assert case not in OVERLOADED or rates["on"] < RATE


def completed(case: Case, system: str, seconds: int, seed: int) -> tuple[list[int], int]:
    """Sentences completed in each second, and how many timed out."""
    spouts, splits, counts = case
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(), spouts)
    builder.set_bolt("split", SplitNumbers(), splits).shuffle_grouping("numbers")
    builder.set_bolt("count", SimulatedCount(WORD / counts), counts).fields_grouping("split", "word")
    delivery = Delivery("at_least_once", max_spout_pending=UNLIMITED, message_timeout=TIME_OUT)
    settings = Settings(delivery=delivery, flow=Flow(SYSTEMS[system]), workers=Workers(64))
    simulated = _simulated()
    runner = simulated.BoundedRunner(builder.build("words", settings), seed=seed, clock=simulated.CLOCK)
    (spout,) = runner.component("numbers")
    acked, last = [], 0
    for _ in range(seconds):
        runner.run(1.0)
        acked.append(spout.acked - last)
        last = spout.acked
    runner.close()
    return acked, spout.failed
