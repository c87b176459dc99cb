"""Servers that need a minute and a gigabyte: these tests are run by ``make stores`` and not by ``make test``."""

import pytest

from penstock.testing.servers.cassandra import CassandraServer
from penstock.testing.servers.hbase import HBaseServer
from tests.conftest import started


@pytest.fixture(scope="session")
def cassandra():
    yield from started(CassandraServer())


@pytest.fixture(scope="session")
def hbase():
    yield from started(HBaseServer())
