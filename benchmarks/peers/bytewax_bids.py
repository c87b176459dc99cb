"""The pass-through of bids in Bytewax: one worker, each bid through a ``map``, the last ones kept in memory, no
recovery. ``peers.bytewax`` installs Bytewax and runs it. Prints one line of JSON."""

from __future__ import annotations

from collections import deque

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import DynamicSource, StatelessSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.testing import run_main

from benchmarks.peers.bids import KEPT, Bid, Watch, main, make_bids


class Bids(DynamicSource[Bid]):  # type: ignore[misc]
    def __init__(self, watch: Watch, batch: int) -> None:
        self._watch, self._batch = watch, batch

    def build(self, step_id: str, worker_index: int, worker_count: int) -> BidsPartition:
        return BidsPartition(self._watch, self._batch)


class BidsPartition(StatelessSourcePartition[Bid]):  # type: ignore[misc]
    def __init__(self, watch: Watch, batch: int) -> None:
        self._watch, self._batch = watch, batch
        self._next_bid = make_bids(seed=1)

    def next_batch(self) -> list[Bid]:
        if self._watch.over:
            raise StopIteration
        next_bid = self._next_bid
        return [next_bid() for _ in range(self._batch)]


class Kept(DynamicSink[Bid]):  # type: ignore[misc]
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def build(self, step_id: str, worker_index: int, worker_count: int) -> KeptPartition:
        return KeptPartition(self._watch)


class KeptPartition(StatelessSinkPartition[Bid]):  # type: ignore[misc]
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._kept: deque[Bid] = deque(maxlen=KEPT)
        self._count = 0

    def write_batch(self, items: list[Bid]) -> None:
        self._kept.extend(items)
        self._count += len(items)
        self._watch.look(self._count)


def passed_on(each: Bid) -> Bid:
    return each


def run(watch: Watch, batch: int) -> None:
    flow = Dataflow("passthrough")
    bids = op.input("bids", flow, Bids(watch, batch))
    op.output("kept", op.map("pass", bids, passed_on), Kept(watch))
    run_main(flow)


if __name__ == "__main__":
    main("bytewax", run)
