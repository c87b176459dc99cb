"""The mechanisms of *Lu 2020* on and off on the same engine (its figures 13 and 15): step-by-step backpressure
against none and against stopping all spouts, with replay in all cases; Storm beside it. With the mechanisms off
nothing limits what is pending, as in Storm's default settings, so in an overloaded topology tuples time out in
queues and are replayed."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.alice import sending
from benchmarks.alice_topology import Count as LineCount
from benchmarks.alice_topology import Lines, Persist
from benchmarks.alice_topology import Split as LineSplit
from benchmarks.book import micros
from benchmarks.fast_words import RandomSentences
from benchmarks.harness import Results, median, running
from benchmarks.hops import APART
from benchmarks.peers.bench import CASES, Case, build_storm, case_name, run_storm, run_storm_kafka
from benchmarks.persistence import by_second
from benchmarks.turns import median_ratio, take_turns
from benchmarks.words import Split
from penstock import (
    BasicBolt,
    Collector,
    Conf,
    Context,
    Delivery,
    Flow,
    Settings,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.connectors.kafka_eden import KafkaEden
from penstock.replay import ReplaySpout
from penstock.settings import Workers
from penstock.spark.session import close_session
from penstock.testing.servers.kafka import KafkaServer

SYSTEMS = {"on": "step", "off": "none", "spout": "spout"}
"""The flow control of each case. Each executor has a worker of its own, so that there is something to control."""
PACKED = "packed"
"""The mechanisms on, and executors share workers as they do by default."""
WORD = 0.001  # seconds that a count takes for a word, as for a call to another system; waiting costs no CPU
RATE = 400  # sentences per second, about 4,600 words: one count task takes 1,000 of them, six take all
TIME_OUT = 5.0  # seconds, in all systems; the default is 30
UNLIMITED = 1_000_000  # pending tuples: more than can come together before they time out
OVERLOADED: tuple[Case, ...] = ((1, 1, 1), (1, 2, 1))
"""The cases in which *Lu 2020* found replays and an improvement of 17 %."""
_SLICE = 0.004  # seconds of waiting that are saved up, because shorter sleeps are inexact
_STEP = 0.5  # seconds between two points of a curve
_SILENT = 1.0  # seconds without a change after which a total stands still: several intervals of reports
_LOOK = 0.02  # seconds between two looks at the total, which changes a few times per second


class Wait:
    """Waits ``seconds`` for each call, in slices."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._owed = seconds, 0.0

    def owe(self) -> None:
        self._owed += self._seconds
        if self._owed >= _SLICE:
            begun = time.monotonic()
            time.sleep(self._owed)
            self._owed -= time.monotonic() - begun


class SlowCount(BasicBolt):
    """Counts words and waits a while for each."""

    plain_tuples = True

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._wait = Wait(WORD)

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._counts[tup[0]] += 1
        self._wait.owe()


@dataclass
class Course:
    """What one system completed."""

    rate: float
    """Completed sentences per second."""
    failed: int
    times: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def slow_word_count(case: Case, system: str, folder: str) -> Topology:
    spouts, splits, counts = case
    builder = TopologyBuilder()
    builder.set_spout("sentences", ReplaySpout(RandomSentences()), spouts).set_max_rate(RATE)
    builder.set_bolt("split", Split(), splits).shuffle_grouping("sentences")
    builder.set_bolt("count", SlowCount(), counts).fields_grouping("split", "word")
    delivery = Delivery("at_least_once", max_spout_pending=UNLIMITED, message_timeout=TIME_OUT, state_dir=folder)
    return builder.build("slow-word-count", Settings(delivery=delivery, flow=Flow(SYSTEMS[system]), workers=APART))


def measure_figure_13(results: Results, options: argparse.Namespace) -> None:
    """*Lu 2020*, figure 13: completed sentences per second in the four cases, in short form the first and the
    last."""
    warm_up, seconds = (8, 12) if options.quick else (7, 10)
    cases = [CASES[0], CASES[3]] if options.quick else list(CASES)
    systems = [*SYSTEMS, "storm"]
    build_storm()
    ratios: dict[Case, float] = {}
    for case in cases:
        name = case_name(case)
        found = take_turns(
            f"FastWordCount {name}",
            systems,
            options.repeats or (1 if options.quick else 3),
            lambda system, number, case=case: _completed(system, case, warm_up, seconds),  # type: ignore[misc]
            lambda course: f"{course.rate:,.0f} sentences/s, {course.failed} failed",
        )
        for system, courses in found.items():
            rate = median([each.rate for each in courses])
            failed = sum(each.failed for each in courses)
            results.row(case=name, system=system, **{"sentences/s": rate}, failed=failed, offered=RATE)
            results.bar(f"lu13.rate.{name}.{system}", rate, f"completed sentences/s of {RATE:,}")
            results.curve(f"lu13.{name}.{system}", courses[-1].times, courses[-1].rates)
        for other in ("off", "spout", "storm"):
            if min(each.rate for each in found[other]) > 0:
                ratio = median_ratio(found["on"], found[other], lambda course: course.rate)
                results.bar(f"lu13.on_vs_{other}.{name}", ratio, "× completed sentences")
        ratios[case] = on_to_off(found["on"], found["off"])
    overloaded = [ratio for case, ratio in ratios.items() if case in OVERLOADED]
    results.bar("lu13.on_vs_off.overloaded", min(overloaded), "× completed sentences, the least overloaded case")
    results.bar("lu13.on_vs_off.otherwise", ratios[CASES[3]], "× completed sentences, nothing overloaded")


def on_to_off(on: Sequence[Course], off: Sequence[Course]) -> float:
    """On to off; if nothing is completed with the mechanisms off, as if it were one sentence per second."""
    return median([ours.rate / max(1.0, theirs.rate) for ours, theirs in zip(on, off, strict=True)])


def _completed(system: str, case: Case, warm_up: int, seconds: int) -> Course:
    if system == "storm":
        return _storm_completed(case, warm_up, seconds)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            running(slow_word_count(case, system, folder)) as handle,
        ):
            return watched(handle, "sentences", warm_up, seconds)
    finally:
        close_session()  # no JVM of Penstock may run while the next system is measured


def watched(handle: Any, spout: str, warm_up: int, seconds: int) -> Course:
    """What the spout's tuples completed, from the end of the warm-up on."""
    bus, begun = handle.internals.bus, time.monotonic()
    seen, steps = [(0.0, 0)], [(0.0, 0)]
    at = 0.0
    while at < warm_up + seconds:
        time.sleep(_LOOK)
        at, acked = time.monotonic() - begun, bus.totals()[spout].acked
        if acked != seen[-1][1]:
            seen.append((at, acked))
        if at >= steps[-1][0] + _STEP:
            steps.append((at, acked))
    points = [(at, (acked - before) / (at - then)) for (then, before), (at, acked) in pairwise(steps)]
    return Course(
        steady_rate(seen, warm_up, warm_up + seconds),
        bus.totals()[spout].failed,
        [at for at, _ in points],
        [value for _, value in points],
    )


def steady_rate(seen: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """The rate of a total between two times. ``seen``: ⟨time, total⟩ whenever it had changed, the first one at 0.
    Workers report in intervals, so a steady rate is counted from the first report after ``begin`` to the last."""
    inside = [each for each in seen if begin <= each[0] <= end]
    before = [total for at, total in seen if at < begin][-1]
    if not inside:
        return 0.0
    (first, least), (last, most) = inside[0], inside[-1]
    if len(inside) > 1 and first - begin < _SILENT and end - last < _SILENT:
        return (most - least) / (last - first)
    return (most - before) / (end - begin)


def _storm_completed(case: Case, warm_up: int, seconds: int) -> Course:
    """Storm with its default settings and the same load, time-out and waiting."""
    more = {"acks": "true", "rate": RATE, "word-us": round(WORD * 1e6), "max-pending": 0}
    found = run_storm(case, False, warm_up, seconds, **more, conf=f"topology.message.timeout.secs={TIME_OUT:.0f}")
    rate = float(found["sentences_per_s"])
    return Course(rate, int(found["failed"]), [float(warm_up), float(warm_up + seconds)], [rate, rate])


# ---- figure 15 -----------------------------------------------------------------------------------------


@dataclass
class Latency(Course):
    """What one system completed, in lines, and how long its words took."""

    p50: float = 0.0
    """ms from the spout's last read of a line until a word of it was persisted. Words of lines that timed out
    later count too."""
    seconds: list[float] = field(default_factory=list)
    p50s: list[float] = field(default_factory=list)
    """By second."""

    def __str__(self) -> str:
        return f"p50 {self.p50:,.0f} ms, {self.rate:,.0f} lines/s, {self.failed} failed"


class SlowPersist(Persist):
    """Writes each count, and waits a while for each word in ``conf["word_s"]``."""

    def prepare(self, conf: Conf, context: Context) -> None:
        super().prepare(conf, context)
        self._wait = Wait(float(conf["word_s"]))

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._wait.owe()
        super().execute(tup, collector)


def measure_figure_15(results: Results, options: argparse.Namespace) -> None:
    """*Lu 2020*, figure 15: latency of the word count from Kafka over time, with a persist bolt that is too slow,
    and with one that is fast."""
    repeats = options.repeats or (1 if options.quick else 3)
    build_storm()
    with KafkaServer() as kafka:
        slow = take_turns(
            "slow persist",
            (*SYSTEMS, "storm"),
            repeats,
            lambda system, number: _word_count(kafka, system, WORD, number, options),
            str,
        )
        fast = take_turns(
            "fast persist",
            ("on", "off", PACKED, "storm"),
            repeats,
            lambda system, number: _word_count(kafka, system, 0.0, number, options),
            str,
        )
    for what, found in (("slow persist", slow), ("fast persist", fast)):
        for system, each in found.items():
            rate, p50 = median([one.rate for one in each]), median([one.p50 for one in each])
            failed = sum(one.failed for one in each)
            results.row(what=what, system=system, **{"lines/s": rate, "p50 ms": p50}, failed=failed, offered=RATE)
    for system, each in slow.items():
        results.bar(f"lu15.p50.{system}", median([one.p50 for one in each]), "ms from the spout's read")
        results.bar(f"lu15.rate.{system}", median([one.rate for one in each]), f"completed lines/s of {RATE:,}")
        results.curve(f"lu15.{system}", each[-1].seconds, each[-1].p50s)
    for system, each in fast.items():
        results.curve(f"lu15.fast.{system}", each[-1].seconds, each[-1].p50s)
    for other in ("off", "spout", "storm"):
        ratio = median_ratio(slow["on"], slow[other], lambda one: max(one.p50, 1e-3))
        results.bar(f"lu15.on_vs_{other}.p50", ratio, "× the p50, slow persist")
    for ours, theirs in (("on", "off"), (PACKED, "storm")):
        ratio = median_ratio(fast[ours], fast[theirs], lambda one: one.p50)
        results.bar(f"lu15.fast.{ours}_vs_{theirs}.p50", ratio, "× the p50, fast persist")
    results.bar("lu15.on_vs_off.overloaded", on_to_off(slow["on"], slow["off"]), "× completed lines, slow persist")
    results.bar("lu15.on_vs_off.otherwise", on_to_off(fast["on"], fast["off"]), "× completed lines, fast persist")


def _word_count(kafka: KafkaServer, system: str, word: float, number: int, options: argparse.Namespace) -> Latency:
    """Lines arrive at ``RATE``. ``word``: seconds that persist takes for a word."""
    warm_up, seconds = (8, 8) if options.quick else (8, 14)
    topic = f"lines-{system}-{'slow' if word else 'fast'}-{number}"
    kafka.create_topic(topic)
    with sending(kafka.bootstrap, topic, RATE, options.text):
        if system == "storm":
            return _storm_words(kafka.bootstrap, topic, word, warm_up, seconds)
        with tempfile.TemporaryDirectory() as folder:
            try:
                topology = kafka_words(kafka.bootstrap, topic, system, word, folder)
                with running(topology) as handle:
                    course = watched(handle, "lines", warm_up, seconds)
                    ended = micros()
            finally:
                close_session()
            since, came = np.load(str(topology.settings.conf["times"]))
    at, (p50s,) = by_second(since, came, int(came[0]), ended, (50,))
    chosen = (came >= ended - seconds * 1_000_000) & (came <= ended)
    if not chosen.any():
        chosen = came >= came[-1] - 1_000_000  # the last that came at all
    p50 = float(np.median(came[chosen] - since[chosen])) / 1000
    return Latency(course.rate, course.failed, course.times, course.rates, p50, list(at), list(p50s))


def kafka_words(bootstrap: str, topic: str, system: str, word: float, folder: str) -> Topology:
    """Lines 1 → split 2 → count 4 → persist 1, tuple by tuple (*Lu 2020*, table 4)."""
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines(KafkaEden(bootstrap, topic, start="latest")))
    builder.set_bolt("split", LineSplit(), 2).shuffle_grouping("lines")
    builder.set_bolt("count", LineCount(), 4).fields_grouping("split", "word")
    builder.set_bolt("persist", SlowPersist(), 1).shuffle_grouping("count")
    conf = {"since": "read", "out": f"{folder}/counts", "times": f"{folder}/times.npy", "word_s": word}
    delivery = Delivery("at_least_once", max_spout_pending=UNLIMITED, message_timeout=TIME_OUT, state_dir=folder)
    workers = Workers() if system == PACKED else APART
    settings = Settings(delivery=delivery, flow=Flow(SYSTEMS.get(system, "step")), workers=workers, conf=conf)
    return builder.build(f"alice-{micros()}", settings)  # a name of its own, so that the replay topics are too


def _storm_words(bootstrap: str, topic: str, word: float, warm_up: int, seconds: int) -> Latency:
    """Storm with its default settings and the same load, time-out and waiting."""
    more = {"since": "read", "start": "latest", "max-pending": 0, "word-us": round(word * 1e6)}
    conf = f"topology.message.timeout.secs={TIME_OUT:.0f}"
    found = run_storm_kafka(bootstrap, topic, False, warm_up, seconds, **more, conf=conf)
    p50 = float(found["latency_ms"]["p50"])
    course = Latency(float(found["acked_lines_per_s"]), int(found["failed"]), p50=p50)
    course.seconds, course.p50s = [float(warm_up), float(warm_up + seconds)], [p50, p50]
    return course
