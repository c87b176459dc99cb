"""Writes lines to a topic: at a steady rate until its input ends, answering every input line with the number sent
so far; or a given number of lines. See ``python -m benchmarks.kafka_producer --help``."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable

import confluent_kafka

from benchmarks.book import book, micros, stamped
from benchmarks.words import sentences

PAUSE = 0.001  # seconds between two checks of what is due: short compared with the measured latencies


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("rate", type=int, help="lines per second; 0: as fast as possible")
    parser.add_argument("--topic", default="lines")
    parser.add_argument("--book", nargs="?", const="", metavar="PATH", help="send a book's lines with time stamps")
    parser.add_argument("--lines", type=int, help="end after this many lines")
    parser.add_argument("--linger", type=float, default=20, help="ms that a line may wait for a batch")
    options = parser.parse_args()
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": options.bootstrap,
            "linger.ms": options.linger,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    send = _sender(producer, options.topic, options.book)
    sent, ended = 0, threading.Event()

    def answer() -> None:
        for _ in sys.stdin:
            print(sent, flush=True)
        ended.set()

    if options.lines is None:
        threading.Thread(target=answer, daemon=True).start()
    begun = time.monotonic()
    while sent != options.lines and not ended.wait(PAUSE if options.rate else 0):
        due = int((time.monotonic() - begun) * options.rate) if options.rate else sent + 1_000
        if options.lines is not None:
            due = min(due, options.lines)
        while sent < due:
            send(sent)
            sent += 1
        producer.poll(0)
    left = producer.flush(60)
    if left:
        raise SystemExit(f"Kafka did not accept {left} lines")


def _sender(producer: confluent_kafka.Producer, topic: str, text: str | None) -> Callable[[int], None]:
    """Sends lines by number; after the last line it begins again with the first."""
    lines = sentences() if text is None else book(text or None)

    def send(number: int) -> None:
        line = lines[number % len(lines)]
        value = line if text is None else stamped(line, micros())
        while True:
            try:
                producer.produce(topic, value)
                return
            except BufferError:  # the client's queue is full: let it send first
                producer.poll(0.1)

    return send


if __name__ == "__main__":
    main()
