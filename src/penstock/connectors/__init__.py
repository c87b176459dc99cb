"""Spouts and sinks for other systems: files, Parquet, sockets, Kafka, PostgreSQL.

Kafka needs ``pip install "penstock[kafka]"``, PostgreSQL ``"penstock[postgres]"``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.connectors.file_eden import FileEden
    from penstock.connectors.files import FileSpout
    from penstock.connectors.kafka_bolt import KafkaBolt
    from penstock.connectors.kafka_eden import KafkaEden
    from penstock.connectors.kafka_replay import KafkaStore
    from penstock.connectors.kafka_sink import KafkaSink
    from penstock.connectors.kafka_spout import KafkaSpout
    from penstock.connectors.parquet import ParquetSink
    from penstock.connectors.postgres import PostgresSink
    from penstock.connectors.sockets import SocketSpout
    from penstock.storage.staging import StagedSink

# Loaded on first use: the client libraries are optional, and a worker should not load those it does not need.
_HOMES = {
    "FileEden": "penstock.connectors.file_eden",
    "FileSpout": "penstock.connectors.files",
    "KafkaBolt": "penstock.connectors.kafka_bolt",
    "KafkaEden": "penstock.connectors.kafka_eden",
    "KafkaSink": "penstock.connectors.kafka_sink",
    "KafkaSpout": "penstock.connectors.kafka_spout",
    "KafkaStore": "penstock.connectors.kafka_replay",
    "ParquetSink": "penstock.connectors.parquet",
    "PostgresSink": "penstock.connectors.postgres",
    "SocketSpout": "penstock.connectors.sockets",
    "StagedSink": "penstock.storage.staging",
}

__all__ = [
    "FileEden",
    "FileSpout",
    "KafkaBolt",
    "KafkaEden",
    "KafkaSink",
    "KafkaSpout",
    "KafkaStore",
    "ParquetSink",
    "PostgresSink",
    "SocketSpout",
    "StagedSink",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
