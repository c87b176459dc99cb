"""A topology fitted to the machine: latency and throughput of the word count from Kafka beside Storm, other
topologies beside Storm and Bytewax, idling, blocking code, width and length, changes of the packing under load."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.alice import (
    Outcome,
    add_backlog_rows,
    add_latency_rows,
    curves_of,
    draw,
    measure_backlog,
    measure_latency,
    p50,
    p99,
    words_a_line,
    words_per_s,
)
from benchmarks.backpressure import measure_overhead
from benchmarks.fit_blocking import measure_blocking
from benchmarks.fit_forms import measure_forms
from benchmarks.fit_growth import measure_growth
from benchmarks.fit_options import figures, repeats_of
from benchmarks.fit_passthrough import measure_passthrough
from benchmarks.fit_repack import measure_repack
from benchmarks.harness import Results, median, run_parts
from benchmarks.hops import APART, Identity, Silent
from benchmarks.ladder import idle_share, measure_hops3
from benchmarks.peers.bench import Case, add_rows, build_storm, measure_case
from benchmarks.turns import median_ratio, spread
from penstock import Settings, Topology, TopologyBuilder
from penstock.spark.session import close_session
from penstock.testing.servers.kafka import KafkaServer

RATE, FASTER = 2_000, 10_000  # lines/s, of about 11 words each
TUPLE, BATCH, STORM, TUNED = "penstock tuple", "penstock batch", "storm", "storm tuned"
FORMS = {TUPLE: "tuple", BATCH: "batch"}


def main(options: argparse.Namespace) -> int:
    """``penstock bench fit``"""
    parts: dict[str, Callable[[Results, argparse.Namespace], None]] = {
        "paced": measure_paced,
        "paced10k": measure_paced10k,
        "backlog": measure_full,
        "one_worker": measure_forms,
        "hops3": measure_hops,
        "idle": measure_idle,
        "flow": measure_flow,
        "fwc": measure_fast_word_count,
        "passthrough": measure_passthrough,
        "blocking": measure_blocking,
        "growth": measure_growth,
        "repack": measure_repack,
    }
    return run_parts("fit", parts, options)


# ---- the word count from Kafka ---------------------------------------------------------------------------


def measure_paced(results: Results, options: argparse.Namespace) -> None:
    """Latency at 2,000 lines per second, since the producer's send."""
    found = _paced(results, options, RATE, (TUPLE, BATCH, STORM))
    results.bar("fit.paced.p50_vs_storm", median_ratio(found[TUPLE], found[STORM], p50), "× storm's p50")
    results.bar("fit.paced.p99_vs_storm", median_ratio(found[TUPLE], found[STORM], p99), "× storm's p99")
    results.bar("fit.paced.batch.p50_vs_storm", median_ratio(found[BATCH], found[STORM], p50), "× storm's p50")
    curves = {f"{RATE:,} lines/s, since a line was sent": curves_of(found)}
    draw(curves, figures(options) / "fit-latency.png")


def measure_paced10k(results: Results, options: argparse.Namespace) -> None:
    """Latency at 10,000 lines per second."""
    found = _paced(results, options, FASTER, (TUPLE, STORM))
    results.bar("fit.paced10k.p50_vs_storm", median_ratio(found[TUPLE], found[STORM], p50), "× storm's p50")


def _paced(
    results: Results, options: argparse.Namespace, rate: int, systems: tuple[str, ...]
) -> dict[str, list[Outcome]]:
    build_storm()
    with KafkaServer() as kafka:
        found = measure_latency(kafka, rate, systems, repeats_of(options), options)
    add_latency_rows(results, rate, found, words_a_line(options))
    return found


def measure_full(results: Results, options: argparse.Namespace) -> None:
    """Words per second while a full topic is processed, against Storm with tuned settings."""
    build_storm()
    with KafkaServer() as kafka:
        found = measure_backlog(kafka, (TUPLE, BATCH, TUNED), repeats_of(options), options)
    add_backlog_rows(results, found, words_a_line(options))
    for system, form in FORMS.items():
        ratio = median_ratio(found[system], found[TUNED], words_per_s)
        results.bar(f"fit.backlog.{form}.vs_storm_tuned", ratio, "× words/s of storm tuned")


# ---- other topologies ------------------------------------------------------------------------------------


def measure_hops(results: Results, options: argparse.Namespace) -> None:
    """Three hops between workers at 1,000 tuples per second."""
    measure_hops3(results, options)
    close_session()


def measure_idle(results: Results, options: argparse.Namespace) -> None:
    """CPU of all processes of a topology 1/2/4/1 without input: packed as by default, in a worker per executor,
    and with spare slots."""
    repeats = repeats_of(options)
    forms: dict[str, Settings] = {
        "default": Settings(),
        "a worker per executor": Settings(workers=APART),
        "default, 8 spare slots": Settings().with_values({"placement.spare_slots": 8}),
    }
    for form, settings in forms.items():
        found = [idle_share(silent(settings), options.quick) for _ in range(repeats)]
        shares, workers = [share for share, _ in found], found[0][1]
        results.row(
            what="idle 1/2/4/1", form=form, workers=workers, core_share=median(shares), repeats=spread(shares)
        )
        if form == "default":
            results.bar("idle.core_share", median(shares), "of one core, all processes")
    close_session()


def silent(settings: Settings) -> Topology:
    """A topology as wide as the word count, whose spout never emits."""
    builder = TopologyBuilder()
    builder.set_spout("lines", Silent())
    builder.set_bolt("split", Identity("n", int), 2).shuffle_grouping("lines")
    builder.set_bolt("count", Identity("n", int), 4).fields_grouping("split", "n")
    builder.set_bolt("persist", Identity("n", int)).shuffle_grouping("count")
    return builder.build("idle", settings)


def measure_flow(results: Results, options: argparse.Namespace) -> None:
    """What flow control costs while nothing is overloaded."""
    measure_overhead(results, options)
    close_session()


def measure_fast_word_count(results: Results, options: argparse.Namespace) -> None:
    """FastWordCount without acks against Storm with default settings: 1/1/1 as users write tuple bolts, 1/4/6 in
    batches."""
    build_storm()
    cases: dict[str, tuple[Case, str]] = {
        "fwc.tuple.noack.vs_storm": ((1, 1, 1), TUPLE),
        "fwc146.batch.noack.vs_storm": ((1, 4, 6), BATCH),
    }
    for name, (case, system) in cases.items():
        rates = measure_case(case, (system, STORM), repeats_of(options), options.quick)
        add_rows(results, case, rates)
        results.bar(name, median_ratio(rates[system], rates[STORM]), "× storm's words/s")
