"""The generator of bids that Penstock and its peers share: the bids of the Nexmark benchmark, whose query 0 passes
each of them on.

Run as a program, it is the lower bound: a plain Python loop that makes bids and keeps them. It prints one line of
JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

Bid: TypeAlias = tuple[int, int, int, int, str]
"""Auction, bidder, price in cents, time in milliseconds, and text that fills the event up to 100 bytes: the fields
of query 0."""
FIELDS = (("auction", int), ("bidder", int), ("price", int), ("date_time", int), ("extra", str))
KEPT = 100_000
"""The peers keep this many of the last bids in memory."""
_IN_FLIGHT = 100  # auctions that are open at a time
_ACTIVE = 1_000  # people who bid at a time
_BEGIN = 1_436_918_400_000  # 2015-07-15, as in Nexmark
_TEXT = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=4_096))


def make_bids(seed: int) -> Callable[[], Bid]:
    """Return a function that makes the next bid, with the distributions of Nexmark's generator: half of the bids
    are for the hot auction, three of four by the hot bidder, prices spread over six decades."""
    draw = random.Random(seed).random
    number = 0

    def next_bid() -> Bid:
        nonlocal number
        number += 1
        newest = number // 15  # auctions; 46 of 50 events of Nexmark are bids, 3 are auctions
        hot = draw() < 0.5
        auction = newest // _IN_FLIGHT * _IN_FLIGHT if hot else newest - int(draw() * _IN_FLIGHT)
        person = number // 46
        hot = draw() < 0.75
        bidder = person // _ACTIVE * _ACTIVE + 1 if hot else person - int(draw() * _ACTIVE)
        price = round(10.0 ** (draw() * 6.0) * 100.0)
        begin = int(draw() * 4_000)
        extra = _TEXT[begin : begin + 54 + int(draw() * 27)]
        return 1_000 + auction, 1_000 + bidder, price, _BEGIN + number // 10, extra

    return next_bid


class Watch:
    """Counts bids, and measures rate and CPU time of this process between the end of a warm-up and the end."""

    def __init__(self, warm_up: float, seconds: float) -> None:
        self._begin = time.monotonic() + warm_up
        self._end = self._begin + seconds
        self._at_begin: tuple[int, float, float] | None = None
        self.over = False

    def look(self, count: int) -> None:
        """Called with the number of bids so far, once per batch."""
        now = time.monotonic()
        if self._at_begin is None and now >= self._begin:
            self._at_begin = count, now, time.process_time()
        if now >= self._end:
            self._at_end = count, now, time.process_time()
            self.over = True

    def result(self, system: str) -> dict[str, Any]:
        assert self._at_begin is not None
        bids, seconds, cpu = (end - begin for begin, end in zip(self._at_begin, self._at_end, strict=True))
        return {"system": system, "bids": bids, "bids_per_s": bids / seconds, "cpu_s": cpu}


def main(system: str, run: Callable[[Watch, int], None]) -> None:
    """Run a peer. Arguments: seconds of warm-up, seconds of measurement, bids per batch."""
    warm_up, seconds, batch = sys.argv[1:4]
    watch = Watch(float(warm_up), float(seconds))
    run(watch, int(batch))
    print(json.dumps(watch.result(system)))


def _loop(watch: Watch, batch: int) -> None:
    next_bid, count = make_bids(seed=1), 0
    kept: deque[Bid] = deque(maxlen=KEPT)
    while not watch.over:
        kept.extend([next_bid() for _ in range(batch)])
        count += batch
        watch.look(count)


if __name__ == "__main__":
    main("plain loop", _loop)
