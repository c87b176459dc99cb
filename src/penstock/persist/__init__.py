"""The delayed persistent queue (*Lu 2020*, section 4.4): results wait in a queue outside the worker and are
written to a store in bulk, so that the topology does not wait for the store.

``PersistBolt`` puts results into the queue and acks them. A separate process, the processor, writes them to the
store when the flush period has passed or enough rows are waiting.
"""

from penstock.persist.bolt import PersistBolt
from penstock.persist.cassandra import CassandraStore
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.hbase import HBaseStore
from penstock.persist.memcached import MemcachedQueue
from penstock.persist.memory import MemoryQueue
from penstock.persist.parquet import ParquetStore
from penstock.persist.postgres import PostgresStore
from penstock.persist.queues import PersistentQueue
from penstock.persist.redis import RedisQueue
from penstock.persist.sqlite import SQLiteStore
from penstock.persist.stores import Overtaken, Store, StoreClient, StoreUnavailable

__all__ = [
    "CassandraStore",
    "EmbeddedQueue",
    "HBaseStore",
    "MemcachedQueue",
    "MemoryQueue",
    "Overtaken",
    "ParquetStore",
    "PersistBolt",
    "PersistentQueue",
    "PostgresStore",
    "RedisQueue",
    "SQLiteStore",
    "Store",
    "StoreClient",
    "StoreUnavailable",
]
