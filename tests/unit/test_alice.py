"""The word counts of Lu 2020, without Kafka and Spark: lines, time stamps, bolts, the verdict."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.alice import SYSTEMS, Outcome, draw, judge, report_backlog, report_latency
from benchmarks.alice_topology import add_bolts
from benchmarks.book import book, made_lines, micros, sent_at, stamped, words_of
from benchmarks.fast_words import RandomSentences
from benchmarks.harness import Results
from penstock import Settings, TopologyBuilder
from penstock.state.values import TaskState
from penstock.testing import FeederSpout, LocalRunner
from penstock.topology.components import Context


def test_made_lines_have_the_shape_of_a_novel():
    lines = made_lines()
    words = Counter(word for line in lines for word in line.split(" "))
    assert all(line and "  " not in line and len(line) <= 72 for line in lines)
    assert 50 < np.mean([len(line) for line in lines]) < 62  # Alice: 56 characters
    assert 9 < words.total() / len(lines) < 12  # Alice: 10.7 words
    assert max(words.values()) > 0.02 * words.total()  # as "the" does
    assert len(words) > 3_000
    assert made_lines() == lines


def test_a_book_is_sent_without_blank_lines_and_with_one_space_between_words(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Down the\n\n   Rabbit-Hole \n \n“Oh  dear!”\n", encoding="utf-8")
    assert book(str(path)) == ["Down the", "Rabbit-Hole", "“Oh dear!”"]


@pytest.mark.parametrize("sent", [0, 1_763_304_000_123_456, pytest.param(micros(), id="now")])
def test_a_time_stamp_comes_back(sent):
    line = stamped("“Oh dear!” said\tshe", sent)
    assert sent_at(line) == sent
    assert words_of(line) == ["“Oh", "dear!”", "said\tshe"]


@pytest.mark.parametrize("since", ["sent", "read"])
@pytest.mark.parametrize("batch", [True, False])
def test_both_forms_persist_each_word_with_its_count_and_time(tmp_path, batch, since):
    lines = ["“Oh dear! Oh dear!”", "the", "Oh the end"]
    conf = {"since": since, "out": str(tmp_path / "out"), "times": str(tmp_path / "times.npy")}
    builder = TopologyBuilder()
    rows = [(stamped(line, 1_000 + number), 2_000 + number) for number, line in enumerate(lines)]
    builder.set_spout("lines", FeederSpout(("line", str), ("read", int), rows=rows))
    add_bolts(builder, batch)
    runner = LocalRunner(builder.build("alice", Settings(conf=conf)))
    runner.run_until_idle()
    runner.close()
    assert runner.errors == []
    wanted = Counter(" ".join(lines).split(" "))
    found = [row.rsplit(" ", 1) for row in (tmp_path / "out").read_text("utf-8").splitlines()]
    assert sorted((word, int(count)) for word, count in found) == sorted(
        (word, count + 1) for word, times in wanted.items() for count in range(times)
    )
    began, came = np.load(tmp_path / "times.npy")
    first = 1_000 if since == "sent" else 2_000
    assert sorted(began) == [first] * 4 + [first + 1] + [first + 2] * 3
    assert all(came > began)


def test_the_verdict_counts_only_what_came_while_it_was_measured():
    came = np.arange(1, 11) * 100_000  # ten words, one every 0.1 s
    waited = np.array([9, 9, 9, 1, 2, 3, 4, 5, 6, 7]) * 1_000
    found = judge(came - waited, came, 350_000, 2_000_000, failed=3)
    assert found.words_per_s == pytest.approx(7 / 0.65)  # to the last word: the rest of the time nothing was there
    assert (found.p50, found.failed) == (4, 3)
    assert judge(came - waited, came, 350_000, 750_000, 0).words_per_s == pytest.approx(4 / 0.4)


def test_a_verdict_on_nothing_is_refused():
    came = np.array([100])
    with pytest.raises(SystemExit, match="no word arrived"):
        judge(came, came, 200, 300, 0)


def outcomes(**values):
    """Of each system, a pair ⟨words/s, p50⟩ a repeat."""
    return {
        system: [Outcome(rate, np.full(99, p50), 0) for rate, p50 in values[system.replace(" ", "_")]]
        for system in SYSTEMS
    }


def test_ratios_are_taken_within_a_repeat_and_their_median_is_the_bar():
    found = outcomes(
        penstock_batch=[(100, 6), (300, 4), (100, 20)],
        penstock_tuple=[(20, 10), (20, 10), (20, 10)],
        storm=[(50, 10), (100, 10), (200, 10)],  # the third repeat was a slow minute of the machine for us
        storm_tuned=[(100, 5), (100, 5), (100, 5)],
    )
    results = Results("backpressure")
    report_latency(results, 2_000, found, words_a_line=10)
    report_latency(results, 10_000, found, words_a_line=10)
    report_backlog(results, found, words_a_line=10)
    bars = {bar["name"]: bar["value"] for bar in results.bars}
    assert bars == {
        "alice.vs_storm.paced_p50": 0.6,
        "alice.vs_storm.paced_p50.tuple": 1,
        "alice.vs_storm.throughput": 2,
        "alice.vs_storm.throughput.tuple": 0.2,
        "alice.vs_storm.p50": 0.6,
        "alice.vs_storm.p50.tuple": 1,
    }
    assert [row["system"] for row in results.rows] == list(SYSTEMS) * 3
    assert results.rows[8]["lines/s"] == 10


def test_the_figure_is_drawn(tmp_path):
    draw({"flat out": {"storm": np.arange(1.0, 100.0)}}, tmp_path / "results" / "alice-latency.png")
    assert (tmp_path / "results" / "alice-latency.png").read_bytes().startswith(b"\x89PNG")


def test_random_sentences_are_read_again_from_the_first_that_is_not_done():
    state = TaskState()
    context = Context("fwc", "sentences", 0, 0, {"sentences": (0,)}, state=state)
    eden, again = RandomSentences(), RandomSentences()
    eden.open({}, context)
    read = eden.read(300) + eden.read(200)
    assert len({values for _, values in read}) > 300  # of a pool of 1,000
    eden.done([position for position, _ in read[:100] + read[150:200]])
    eden.before_snapshot()
    again.open({}, context)
    assert again.read(400) == read[100:]
