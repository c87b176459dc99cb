"""Writes lines to the topic ``lines`` at a steady rate, and answers every line on its input with the number sent
so far; ends when its input does. ``python -m benchmarks.kafka_producer BOOTSTRAP RATE``"""

from __future__ import annotations

import sys
import threading
import time

import confluent_kafka

from benchmarks.words import sentences


def main() -> None:
    bootstrap, rate = sys.argv[1], int(sys.argv[2])
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000}
    )
    pool = [sentence.encode() for sentence in sentences()]
    batch = max(1, rate // 100)
    sent, ended = 0, threading.Event()

    def answer() -> None:
        for _ in sys.stdin:
            print(sent, flush=True)
        ended.set()

    threading.Thread(target=answer, daemon=True).start()
    begun = time.monotonic()
    while not ended.wait(0.005):
        due = int((time.monotonic() - begun) * rate)
        while sent + batch <= due:
            at = sent % len(pool)
            for line in (pool[at:] + pool[:at])[:batch]:
                producer.produce("lines", line)
            producer.poll(0)
            sent += batch
    producer.flush(30)


if __name__ == "__main__":
    main()
