"""Never wait for the database: results wait in a queue outside the worker, and are written in bulk.

The bolt puts results in the queue and acks them; a processor of its own writes them to the store when the flush
period has passed or enough of them wait (SPEC 5).
"""

from penstock.persist.bolt import PersistBolt
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.memcached import MemcachedQueue
from penstock.persist.parquet import ParquetStore
from penstock.persist.postgres import PostgresStore
from penstock.persist.queues import PersistentQueue
from penstock.persist.redis import RedisQueue
from penstock.persist.sqlite import SQLiteStore
from penstock.persist.stores import Store

__all__ = [
    "EmbeddedQueue",
    "MemcachedQueue",
    "ParquetStore",
    "PersistBolt",
    "PersistentQueue",
    "PostgresStore",
    "RedisQueue",
    "SQLiteStore",
    "Store",
]
