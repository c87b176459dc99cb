"""The word count 1/2/4/1 in several packings: latency at a given rate and throughput, with lines that the spout
makes itself, so that only the topology is measured; and from Kafka with everything in one worker."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping

from benchmarks.alice import Load, Outcome, observe, run, sending, words_settings
from benchmarks.alice_topology import add_bolts
from benchmarks.book import book, micros, stamped
from benchmarks.fit_options import repeats_of
from benchmarks.harness import Results, median
from benchmarks.hops import APART
from benchmarks.turns import spread, take_turns
from penstock import Conf, Context, OutputDeclarer, Settings, Spout, SpoutCollector, Topology, TopologyBuilder
from penstock.spark.session import close_session
from penstock.testing.servers.kafka import KafkaServer

RATE = 2_000  # lines/s, of about 11 words each
FORMS: Mapping[str, int] = {"a worker per executor": APART.count, "default": 0, "two workers": 2, "one worker": 1}
"""The setting ``workers`` of each form."""


def measure_forms(results: Results, options: argparse.Namespace) -> None:
    """Part of ``penstock bench fit``. ``--quick`` measures two forms at the given rate only."""
    repeats = repeats_of(options)
    forms = ("default", "one worker") if options.quick else tuple(FORMS)
    warm_up, seconds = (4, 5) if options.quick else (10, 15)

    def turn(rate: int) -> Callable[[str, int], Outcome]:
        load = Load("", "", "sent" if rate else "read", 0, warm_up, seconds)
        return lambda form, number: _run(load, rate, FORMS[form], options.text)

    paced = take_turns(f"{RATE:,} lines/s", forms, repeats, turn(RATE), str)
    flat_out = {} if options.quick else take_turns("flat out", forms, repeats, turn(0), str)
    for form, found in paced.items():
        row = _latencies(found)
        if form in flat_out:
            rates = [each.words_per_s for each in flat_out[form]]
            row |= {"words/s flat out": median(rates), "repeats flat out": spread(rates, "{:,.0f}".format)}
        results.row(what=f"lines from the spout, {RATE:,}/s", form=form, **row)
    one = median([each.p50 for each in paced["one worker"]])
    results.bar("fit.one_worker.p50_ms", one, "ms, lines from the spout")
    _measure_kafka(results, repeats, warm_up, seconds, options.text)


def _measure_kafka(results: Results, repeats: int, warm_up: int, seconds: int, text: str | None) -> None:
    with KafkaServer() as kafka:

        def turn(form: str, number: int) -> Outcome:
            topic = f"lines-{form.replace(' ', '-')}-{number}"
            kafka.create_topic(topic)
            load = Load(kafka.bootstrap, topic, "sent", 0, warm_up, seconds)
            with sending(kafka.bootstrap, topic, RATE, text):
                return run("penstock tuple", load, FORMS[form])

        found = take_turns(f"from Kafka, {RATE:,} lines/s", ("one worker",), repeats, turn, str)["one worker"]
    results.row(what=f"lines from Kafka, {RATE:,}/s", form="one worker", **_latencies(found))
    one = median([each.p50 for each in found])
    results.bar("fit.one_worker.kafka.p50_ms", one, "ms, from the producer's send")


def _latencies(found: list[Outcome]) -> dict[str, object]:
    return {
        "workers": found[0].workers,
        "p50_ms": median([each.p50 for each in found]),
        "p99_ms": median([each.p99 for each in found]),
        "words/s": median([each.words_per_s for each in found]),
        "failed": sum(each.failed for each in found),
        "repeats": spread([each.p50 for each in found]),
    }


def _run(load: Load, rate: int, workers: int, text: str | None) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        settings = words_settings(load, folder, workers)
        try:
            return observe(made_word_count(rate, text, settings), load)
        finally:
            close_session()


def made_word_count(rate: int, text: str | None, settings: Settings) -> Topology:
    """The word count of ``alice_topology`` in the tuple form, with lines that the spout makes."""
    builder = TopologyBuilder()
    builder.set_spout("lines", MadeLines(rate, text))
    add_bolts(builder, batch=False)
    return builder.build(f"made-word-count-{micros()}", settings)


class MadeLines(Spout):
    """Emits ``rate`` lines per second, stamped with the time at which each was due; 0: as many as possible,
    stamped with the time of the emit."""

    def __init__(self, rate: int, text: str | None) -> None:
        self._rate, self._text = rate, text

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("line", str), ("read", int))

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector = collector
        self._lines = book(self._text)
        self._number = 0

    def activate(self) -> None:
        self._begun = micros()

    def next_tuple(self) -> None:
        now = micros()
        due = self._begun + self._number * 1_000_000 // self._rate if self._rate else now
        if due <= now:
            line = self._lines[self._number % len(self._lines)]
            self._number += 1
            self._collector.emit([stamped(line, due), now], msg_id=self._number)
