"""Servers for integration tests. Each runs in its own processes, which end with the test process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.testing.servers.cassandra import CassandraServer
    from penstock.testing.servers.cluster import SparkCluster
    from penstock.testing.servers.hbase import HBaseServer
    from penstock.testing.servers.kafka import KafkaServer
    from penstock.testing.servers.memcached import MemcachedServer
    from penstock.testing.servers.postgres import PostgresServer
    from penstock.testing.servers.redis import RedisServer
    from penstock.testing.servers.zookeeper import ZooKeeperServer

# Imported on first use, because each needs other programs and client libraries.
_HOMES = {
    "CassandraServer": "penstock.testing.servers.cassandra",
    "HBaseServer": "penstock.testing.servers.hbase",
    "KafkaServer": "penstock.testing.servers.kafka",
    "MemcachedServer": "penstock.testing.servers.memcached",
    "PostgresServer": "penstock.testing.servers.postgres",
    "RedisServer": "penstock.testing.servers.redis",
    "SparkCluster": "penstock.testing.servers.cluster",
    "ZooKeeperServer": "penstock.testing.servers.zookeeper",
}

__all__ = [
    "CassandraServer",
    "HBaseServer",
    "KafkaServer",
    "MemcachedServer",
    "PostgresServer",
    "RedisServer",
    "SparkCluster",
    "ZooKeeperServer",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
