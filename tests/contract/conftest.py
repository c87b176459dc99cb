"""One real Kafka broker for all tests that want one."""

import itertools

import pytest

from penstock.errors import EnvironmentFault
from penstock.testing.kafka import KafkaServer

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def kafka():
    """A broker for the whole session. A test that stops it starts it again."""
    server = KafkaServer()
    try:
        server.start()
    except EnvironmentFault as fault:
        server.close()
        pytest.skip(f"not run: {fault}")
    yield server
    server.close()


@pytest.fixture
def topic(kafka):
    """Creates topics with names no other test has: ``topic()``, ``topic(partitions=4)``."""

    def create(partitions=1):
        name = f"topic-{next(_numbers)}"
        kafka.create_topic(name, partitions)
        return name

    return create
