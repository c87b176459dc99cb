"""Stateless replay (*Lu 2020*, section 4.2): the queues Eden, From and To of a spout, and dead letters."""

from penstock.replay.eden import Eden, QueueEden
from penstock.replay.embedded import DiskQueue, EmbeddedStore
from penstock.replay.progress import ReadProgress
from penstock.replay.queues import ReplayQueue, ReplayStore
from penstock.replay.records import ReplayRecord, lost
from penstock.replay.replayer import Replayer
from penstock.replay.spout import ReplaySpout

__all__ = [
    "DiskQueue",
    "Eden",
    "EmbeddedStore",
    "QueueEden",
    "ReadProgress",
    "ReplayQueue",
    "ReplayRecord",
    "ReplaySpout",
    "ReplayStore",
    "Replayer",
    "lost",
]
