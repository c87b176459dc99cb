"""The load monitor's load samples in a real PostgreSQL."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.driver.load_store import LoadStore, open_store
from penstock.testing.servers.postgres import PostgresServer
from tests.unit.test_load_store import sample

psycopg = pytest.importorskip("psycopg")


@pytest.fixture
def server(postgres: PostgresServer) -> PostgresServer:
    return postgres


def opened(target: str) -> LoadStore:
    store = open_store(target, "", 100.0)
    assert store is not None
    return store


def rows(target: str, table: str) -> list[Any]:
    with psycopg.connect(target) as connection:
        return connection.execute(f"SELECT * FROM {table} ORDER BY topology, ended").fetchall()


def url(server: PostgresServer) -> str:
    """The server's connection string as the setting has it."""
    options = psycopg.conninfo.conninfo_to_dict(server.dsn)
    return "postgresql:///?" + "&".join(f"{name}={value}" for name, value in options.items())


def test_load_samples_are_kept_and_pruned(server: PostgresServer) -> None:
    target = url(server)
    store = opened(target)
    for ended in (900.0, 930.0, 1010.0):
        store.put(sample(ended))
    store.flush()
    assert (store.written, store.dropped, store.error) == (3, 0, "")
    store.close()
    assert rows(target, "penstock_load_samples") == [("words", 930.0, 30.0), ("words", 1010.0, 30.0)]
    assert rows(target, "penstock_executor_loads")[1] == (
        ("words", 1010.0, "split@1.0", "split", "a/1", 0.5, 1000.0, 10.0, 20.0)
    )
    assert rows(target, "penstock_stream_loads")[0][2:] == ("lines@0.0", "split@1.0", 5.0, 10.0)
    assert rows(target, "penstock_node_loads")[0][2:] == ("a/1", 0.5, 1000.0, 30.0, 0.25, 50.0)


def test_a_server_that_is_away_costs_load_samples_and_nothing_else(server: PostgresServer) -> None:
    """Its connection is cut: the load sample on its way is lost, the next has a new one."""
    target = url(server)
    store = opened(target)
    store.put(sample(2000.0))
    store.flush()
    with psycopg.connect(target, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    store.put(sample(2001.0))
    store.flush()
    assert (store.written, store.dropped) == (1, 1)
    assert store.error
    store.put(sample(2002.0))
    store.flush()
    assert (store.written, store.dropped, store.error) == (2, 1, "")
    store.close()
    assert [row[1] for row in rows(target, "penstock_load_samples")] == [2000.0, 2002.0]


def test_nobody_listens() -> None:
    store = opened("postgresql://127.0.0.1:9/none")
    store.put(sample(1.0))
    store.flush()
    assert (store.written, store.dropped) == (0, 1)
    assert "OperationalError" in store.error
    store.close()
