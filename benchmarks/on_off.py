"""The mechanisms of *Lu 2020* on and off on the same engine (its figures 13 and 15): step-by-step backpressure
against none and against stopping all spouts, with replay in all cases; Storm beside it. With the mechanisms off
nothing limits what is pending, as in Storm's default settings, so in an overloaded topology tuples time out in
queues and are replayed."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.alice import Load, Outcome, fill_topic, observe, run, sending, words_settings
from benchmarks.alice_topology import kafka_word_count
from benchmarks.book import micros
from benchmarks.fast_words import RandomSentences
from benchmarks.harness import Results, median, running
from benchmarks.hops import APART
from benchmarks.peers.bench import CASES, Case, build_storm, case_name, run_storm
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
from penstock.replay import ReplaySpout
from penstock.spark.session import close_session
from penstock.testing.servers.kafka import KafkaServer

SYSTEMS = {"on": "step", "off": "none", "spout": "spout"}
"""The flow control of each case."""
WORD = 0.001  # seconds that a count takes for a word, as for a call to another system; waiting costs no CPU
RATE = 400  # sentences per second, about 4,600 words: one count task takes 1,000 of them, six take all
TIME_OUT = 5.0  # seconds, in all systems; the default is 30
UNLIMITED = 1_000_000  # pending tuples: more than can come together before they time out
OVERLOADED: tuple[Case, ...] = ((1, 1, 1), (1, 2, 1))
"""The cases in which *Lu 2020* found replays and an improvement of 17 %."""
_SLICE = 0.004  # seconds of waiting that are saved up, because shorter sleeps are inexact
_STEP = 0.5  # seconds between two points of a curve
_PACED = 2_000  # lines per second of the word count that is not overloaded


class SlowCount(BasicBolt):
    """Counts words and waits a while for each."""

    plain_tuples = True

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._owed = 0.0

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._counts[tup[0]] += 1
        self._owed += WORD
        if self._owed >= _SLICE:
            begun = time.monotonic()
            time.sleep(self._owed)
            self._owed -= time.monotonic() - begun


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
    warm_up, seconds = (8, 12) if options.quick else (10, 30)
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


def on_to_off(on: list[Course], off: list[Course]) -> float:
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
            return _watched(handle, warm_up, seconds)
    finally:
        close_session()  # no JVM of Penstock may run while the next system is measured


def _watched(handle: Any, warm_up: int, seconds: int) -> Course:
    bus, begun = handle.internals.bus, time.monotonic()
    seen = [(0.0, 0)]
    while seen[-1][0] < warm_up + seconds:
        time.sleep(_STEP)
        seen.append((time.monotonic() - begun, bus.totals()["sentences"].acked))
    points = [(at, (acked - before) / (at - then)) for (then, before), (at, acked) in pairwise(seen)]
    first = next(each for each in seen if each[0] >= warm_up)
    rate = (seen[-1][1] - first[1]) / (seen[-1][0] - first[0])
    failed = bus.totals()["sentences"].failed
    return Course(rate, failed, [at for at, _ in points], [value for _, value in points])


def _storm_completed(case: Case, warm_up: int, seconds: int) -> Course:
    """Storm with its default settings and the same load, time-out and waiting."""
    more = {"acks": "true", "rate": RATE, "word-us": round(WORD * 1e6), "max-pending": 0}
    found = run_storm(case, False, warm_up, seconds, **more, conf=f"topology.message.timeout.secs={TIME_OUT:.0f}")
    rate = float(found["sentences_per_s"])
    return Course(rate, int(found["failed"]), [float(warm_up), float(warm_up + seconds)], [rate, rate])


# ---- figure 15 -----------------------------------------------------------------------------------------


def measure_figure_15(results: Results, options: argparse.Namespace) -> None:
    """*Lu 2020*, figure 15: the word count from Kafka with a full topic, and at a load that all can bear."""
    lines, warm_up, seconds = (200_000, 4, 10) if options.quick else (1_500_000, 10, 50)
    repeats = options.repeats or (1 if options.quick else 3)
    build_storm()
    curves: dict[str, tuple[Any, Any]] = {}
    with KafkaServer() as kafka:
        words = fill_topic(kafka, "full", lines, options.text)
        load = Load(kafka.bootstrap, "full", "read", words, warm_up, seconds)

        def full(system: str, number: int) -> Outcome:
            outcome, curves[system] = _word_count(system, load)
            return outcome

        found = take_turns("full topic", ("on", "off", "storm"), repeats, full, str)
        paced = take_turns(
            f"{_PACED:,} lines/s",
            ("on", "off"),
            repeats,
            lambda system, number: _paced(kafka, system, number, options),
            str,
        )
    for system, outcomes in found.items():
        results.row(
            what="full topic", system=system, p50=median([each.p50 for each in outcomes]), **_rates(outcomes)
        )
        results.bar(f"lu15.p50.{system}", median([each.p50 for each in outcomes]), "ms from the spout's read")
        results.bar(f"lu15.words.{system}", median([each.words_per_s for each in outcomes]), "words/s, full topic")
        results.curve(f"lu15.{system}", *curves[system])
    for system, outcomes in paced.items():
        what = f"{_PACED:,} lines/s"
        results.row(what=what, system=system, p50=median([each.p50 for each in outcomes]), **_rates(outcomes))
    p50s = median_ratio(found["on"], found["off"], lambda each: each.p50)
    results.bar("lu15.on_vs_off.p50", p50s, "× the p50 with a full topic")
    rates = median_ratio(found["on"], found["off"], lambda each: each.words_per_s)
    results.bar("lu15.on_vs_off.overloaded", rates, "× words/s with a full topic")
    calm = median_ratio(paced["on"], paced["off"], lambda each: each.words_per_s)
    results.bar("lu15.on_vs_off.otherwise", calm, f"× words/s at {_PACED:,} lines/s")
    storm = median_ratio(found["on"], found["storm"], lambda each: each.p50)
    results.bar("lu15.on_vs_storm.p50", storm, "× Storm's p50 with a full topic")


def _rates(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "words/s": median([each.words_per_s for each in outcomes]),
        "failed": sum(each.failed for each in outcomes),
    }


def _paced(kafka: KafkaServer, system: str, number: int, options: argparse.Namespace) -> Outcome:
    warm_up, seconds = (5, 8) if options.quick else (10, 30)
    topic = f"lines-{system}-{number}"
    kafka.create_topic(topic)
    with sending(kafka.bootstrap, topic, _PACED, options.text):
        return _word_count(system, Load(kafka.bootstrap, topic, "sent", 0, warm_up, seconds))[0]


def _word_count(system: str, load: Load) -> tuple[Outcome, tuple[Any, Any]]:
    """The outcome, and p50 over time."""
    if system == "storm":
        outcome = run(system, load)
        return outcome, ([0.0, float(load.seconds)], [outcome.p50, outcome.p50])
    with tempfile.TemporaryDirectory() as folder:
        settings = words_settings(load, folder)
        settings = replace(
            settings,
            delivery=replace(settings.delivery, max_spout_pending=UNLIMITED),
            flow=Flow(SYSTEMS[system]),
            workers=APART,  # flow control acts between workers
        )
        topology = kafka_word_count(load.bootstrap, load.topic, load.start, True, settings, f"alice-{micros()}")
        try:
            outcome = observe(topology, load)
        finally:
            close_session()
        since, came = np.load(str(settings.conf["times"]))
    seconds, (p50,) = by_second(since, came, int(came[0]), int(came[-1]), (50,))
    return outcome, (seconds, p50)
