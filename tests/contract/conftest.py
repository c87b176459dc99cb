"""One real server of each kind for all tests that need one. A test that stops a server restarts it."""

import itertools

import pytest

from penstock.errors import EnvironmentFault
from penstock.testing.servers.kafka import KafkaServer
from penstock.testing.servers.memcached import MemcachedServer
from penstock.testing.servers.postgres import PostgresServer
from penstock.testing.servers.redis import RedisServer
from tests.conftest import started

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def kafka():
    yield from started(KafkaServer())


@pytest.fixture(scope="session")
def redis_server():
    yield from started(RedisServer())


@pytest.fixture(scope="session")
def memcached_server():
    yield from started(MemcachedServer())


@pytest.fixture(scope="session")
def memcached_servers():
    """Three servers that no test stops."""
    with MemcachedServer() as one, MemcachedServer() as two, MemcachedServer() as three:
        yield [one, two, three]


@pytest.fixture(scope="module")
def postgres():
    """One server per module, because some tests kill it."""
    try:
        server = PostgresServer()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))
    with server:
        yield server


@pytest.fixture
def topic(kafka):
    """Creates topics with unique names: ``topic()``, ``topic(partitions=4)``."""

    def create(partitions=1):
        name = f"topic-{next(_numbers)}"
        kafka.create_topic(name, partitions)
        return name

    return create
