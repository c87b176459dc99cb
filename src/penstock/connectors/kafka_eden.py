"""A Kafka topic as the source of a ``ReplaySpout``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.acking.lineage import I64
from penstock.columns import to_values
from penstock.connectors.inflight import PositionsInFlight
from penstock.connectors.kafka_client import Options, client_library, connecting, where
from penstock.connectors.kafka_replay import KafkaStore
from penstock.connectors.kafka_second_reader import SECOND_CONSUMER, KafkaSecondReader
from penstock.connectors.kafka_spout import OFFSET_BITS, OFFSET_MASK, KafkaSpout
from penstock.replay.eden import Eden
from penstock.replay.queues import ReplayStore
from penstock.replay.records import ReplayRecord, lost
from penstock.topology.components import Columns, Conf, Context
from penstock.topology.streams import DEFAULT_STREAM


class KafkaEden(Eden):
    """A Kafka topic as the source of a ``ReplaySpout``; its replay queues are topics with related names.

    The arguments are those of ``KafkaSpout``. The position is kept in the task's state. A failed tuple is read
    again from the topic, which must therefore keep its records for as long as they are processed. A record that
    Kafka has deleted meanwhile becomes a dead letter that says where it was.
    """

    def __init__(
        self, bootstrap: str, topic: str, *, options: Options = MappingProxyType({}), **more: Any
    ) -> None:
        self._spout = _ForwardReader(bootstrap, topic, options=options, **more)
        self.fields = tuple((field.name, field.type) for field in self._spout.schema)
        self._bootstrap, self._topic, self._options = bootstrap, topic, dict(options)

    def open(self, conf: Conf, context: Context) -> None:
        self._emitted: list[tuple[int, tuple[Any, ...]]] = []
        self._spout.open(conf, context, _Catcher(self._emitted))
        component = where(context.component, context.task)
        self._again = KafkaSecondReader(component, self._bootstrap, self._second_consumer)

    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        if not self._emitted:  # the last call may have raised after records were read
            self._spout.limit(limit)
            self._spout.next_batch()
        found = list(self._emitted)
        self._emitted.clear()
        return found

    def read_again(self, positions: I64) -> list[tuple[Any, ...] | ReplayRecord]:
        place = int(positions[0]) >> OFFSET_BITS
        offsets = positions[positions >> OFFSET_BITS == place] & OFFSET_MASK  # the others are asked for next
        topic, partition = self._spout.partition(place)
        messages = self._again.read(topic, partition, offsets)
        values = iter(self._spout.values([each for each in messages if not isinstance(each, str)]))
        return [
            lost(f"{topic} partition {partition} offset {offset}", each) if isinstance(each, str) else next(values)
            for offset, each in zip(offsets.tolist(), messages, strict=False)
        ]

    def wait(self, seconds: float) -> bool:
        self._spout.wait(seconds)
        return True

    def done(self, positions: I64) -> None:
        self._spout.ack_many(positions)  # type: ignore[arg-type]

    def before_snapshot(self) -> None:
        self._spout.before_snapshot()

    def after_commit(self) -> None:
        self._spout.after_commit()

    def lag(self) -> Mapping[str, int]:
        return self._spout.lag()

    def close(self) -> None:
        self._spout.close()
        self._again.close()

    def store(self) -> ReplayStore:
        return KafkaStore(self._bootstrap, self._topic, options=self._options)

    def _second_consumer(self) -> Any:
        """A consumer that, like the first, sees committed transactions only. It needs no other rights."""
        return client_library().Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": self._spout.group,  # required by the library; nothing is committed
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "isolation.level": "read_committed",
                "error_cb": self._spout.errors.note,
                "log_level": 2,
                **SECOND_CONSUMER,
                **connecting(self._options),
            }
        )


class _Catcher:
    """A collector that keeps rows and message ids, which are the positions."""

    def __init__(self, emitted: list[tuple[int, tuple[Any, ...]]]) -> None:
        self._emitted = emitted

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        return True

    def room(self, stream: str = DEFAULT_STREAM) -> int:
        return sys.maxsize

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        assert isinstance(columns, pa.RecordBatch)
        assert msg_ids is not None
        values = map(to_values, columns.columns)
        self._emitted.extend(zip(map(int, msg_ids), zip(*values, strict=True), strict=True))

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        raise NotImplementedError("KafkaSpout has one stream")


class _ForwardReader(KafkaSpout):
    """Reads records and keeps only the positions of those that are not done."""

    flight = PositionsInFlight

    _most = 0

    def limit(self, records: int) -> None:
        """Let ``next_batch`` emit at most so many records, so that none has to be kept."""
        self._most = self._most or self._batch
        self._batch = min(records, self._most)

    @property
    def group(self) -> str:
        return self._reader.group

    @property
    def schema(self) -> pa.Schema:
        return self._decoder.schema

    def partition(self, place: int) -> tuple[str, int]:
        """The topic and number of a partition of this task."""
        reading = self._reader.readings[place]
        return reading.topic, reading.number

    def values(self, messages: list[Any]) -> list[tuple[Any, ...]]:
        """The tuples of these messages."""
        if not messages:
            return []
        offsets = np.fromiter((each.offset() for each in messages), np.int64, len(messages))
        columns = self._decoder.rows(messages, offsets).columns
        return list(zip(*map(to_values, columns), strict=True))
