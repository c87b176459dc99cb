"""Secrets are read from the environment or a file by the process that connects, and are never displayed."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock import Settings, TopologyBuilder, redaction
from penstock.cli.main import main
from penstock.connectors.kafka_client import connecting
from penstock.connectors.postgres import PostgresSink
from penstock.credentials import Placeholders, literal_secrets, resolved, resolved_url, resolved_values
from penstock.driver.engine import QueryLaunch
from penstock.driver.load_store import open_store
from penstock.errors import EnvironmentFault, PenstockError, TopologyError
from penstock.filesystems import open_url
from penstock.metrics.bus import MetricsBus
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.keeper import Keeper
from penstock.persist.parquet import ParquetStore
from penstock.persist.postgres import PostgresStore
from penstock.persist.redis import RedisClient, RedisQueue
from penstock.persist.spec import ProcessorSpec
from penstock.plan.planner import make_plan
from penstock.state.store import StateStore
from penstock.storage import postgres_rows
from penstock.testing import LocalRunner, NumberSpout
from penstock.topology.components import BasicBolt, Context
from penstock.worker.failures import blame

SECRET = "p@ss/w:rd %x"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setattr(redaction, "_hidden", ())
    monkeypatch.setenv("DB_PASSWORD", SECRET)
    monkeypatch.delenv("NOT_SET", raising=False)
    (tmp_path / "secret").write_text(SECRET + "\n")


def test_values_come_from_the_environment_and_from_files(tmp_path):
    assert resolved("a ${DB_PASSWORD} b", "x") == f"a {SECRET} b"
    assert resolved(f"${{file:{tmp_path}/secret}}", "x") == SECRET
    assert resolved("$${DB_PASSWORD} $HOME {x} ${not a name}", "x") == "${DB_PASSWORD} $HOME {x} ${not a name}"
    assert redaction.redacted(f"error: {SECRET}!") == "error: ***!"


def test_values_are_encoded_inside_a_url_and_a_whole_url_is_not(monkeypatch):
    assert resolved_url("redis://:${DB_PASSWORD}@h", "x") == "redis://:p%40ss%2Fw%3Ard%20%25x@h"
    monkeypatch.setenv("CACHE", "redis://:a%40b@h")
    assert resolved_url("${CACHE}", "x") == "redis://:a%40b@h"


def test_nested_values():
    values = {"a": ["${DB_PASSWORD}", 3], "b": ("x", None), "c": {"d": "${DB_PASSWORD}"}}
    assert resolved_values(values, "x") == {"a": [SECRET, 3], "b": ("x", None), "c": {"d": SECRET}}


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(EnvironmentFault) as missing:
        resolved("${NOT_SET}", "PostgreSQL connection string")
    assert str(missing.value) == (
        "PostgreSQL connection string: the environment variable NOT_SET is not set in this "
        "process. Set NOT_SET where Spark's workers start, or use ${file:PATH} with a file that every node "
        "has."
    )
    with pytest.raises(EnvironmentFault, match=r"the file /no/such cannot be read on this node.*No such file"):
        resolved("${file:/no/such}", "x")
    (tmp_path / "large").write_text("x" * 70_000)
    with pytest.raises(EnvironmentFault, match="more than 65536 characters"):
        resolved(f"${{file:{tmp_path}/large}}", "x")


def test_placeholders_pass_a_parser():
    parts = Placeholders("u:${DB_PASSWORD}@${NOT_SET}")
    user, host = parts.text.split("@")
    assert parts.resolve(user, "x") == f"u:{SECRET}"
    assert parts.show(host) == "${NOT_SET}"
    assert parts.resolve(5432, "x") == 5432


# ---- PostgreSQL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dsn",
    [
        "host=db user=u password=${DB_PASSWORD}",
        "host=db user=u password='${DB_PASSWORD}'",
        "postgresql://u:${DB_PASSWORD}@db/",
        "postgresql://u:p%40ss%2Fw%3Ard%20%25x@db/",
        "postgresql://u@db/?password=${DB_PASSWORD}",
    ],
)
def test_a_dsn_is_resolved_where_it_connects(dsn):
    options = postgres_rows.connection_options(dsn)
    assert (options["host"], options["user"], options["password"]) == ("db", "u", SECRET)
    assert SECRET not in redaction.redacted(f"x {SECRET}")
    assert postgres_rows.address(dsn) == "db:5432/"


def test_a_dsn_may_be_a_reference_altogether(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:x1y2@db/shop")
    assert postgres_rows.connection_options("${DATABASE_URL}")["password"] == "x1y2"
    assert postgres_rows.address("${DATABASE_URL}") == "${DATABASE_URL}"
    PostgresStore("${DATABASE_URL}", "t").check("component 'x'")
    assert open_store("${DATABASE_URL}", "", 1.0) is not None


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:hunt/er2@db/shop",
        "postgresql://u:hunt@er2@db/shop",
        "host=db password hunter2",
        "postgresql://u:hunter2%zz@db/shop",
    ],
)
def test_a_dsn_that_is_misread_shows_nothing_of_its_password(dsn):
    for call in (postgres_rows.connection_options, postgres_rows.address, postgres_rows.connect):
        with pytest.raises(EnvironmentFault) as fault:
            call(dsn)
        assert not any(part in str(fault.value) for part in ("hunt", "er2"))
    with pytest.raises(TopologyError) as refused:
        PostgresStore(dsn, "t").check("component 'x'")
    assert not any(part in str(refused.value) for part in ("hunt", "er2"))


def test_a_sink_that_cannot_reach_its_server_shows_no_password():
    sink = PostgresSink("host=127.0.0.1 port=1 user=u password=hunter2", "t", retry_for=0.0)
    with pytest.raises(PenstockError) as failed:
        sink.prepare({}, Context("t", "c", 1, 0, 1))
    assert "127.0.0.1:1" in str(failed.value)
    assert "hunter2" not in str(failed.value)


# ---- others --------------------------------------------------------------------------------------------


def test_redis():
    queue = RedisQueue("redis://u:${DB_PASSWORD}@127.0.0.1:1/3")
    queue.check("component 'x'", "")
    assert str(queue) == "on Redis at 127.0.0.1:1/3"
    client = queue.open("q", "")
    assert client._redis.connection_pool.connection_kwargs["password"] == SECRET
    with pytest.raises(PenstockError) as away:
        client.waiting()
    assert SECRET not in str(away.value)
    assert SECRET.encode() not in pickle.dumps(queue)


@pytest.mark.parametrize("url", ["redis://u:hunt/er2@h:6379/0", "redis://:hunt/er2@h"])
def test_a_url_of_redis_that_is_misread_shows_nothing_of_its_password(url):
    queue = RedisQueue(url)
    assert str(queue) == f"on Redis at {'h:6379/0' if '6379' in url else 'h'}"
    for call in (lambda: queue.check("x", ""), lambda: RedisClient("q", url, str(queue))):
        with pytest.raises(PenstockError) as refused:
            call()
        assert not any(part in str(refused.value) for part in ("hunt", "er2"))


class Guarded(MemoryFileSystem):
    """Takes a password from its URL, like sftp and ftp."""

    protocol = "guarded"
    cachable = False

    def __init__(self, password="", host="", username="", **options):
        super().__init__(**options)
        self.password, self.host, self.username = password, host, username

    @staticmethod
    def _get_kwargs_from_urls(url):
        parts = fsspec.utils.infer_storage_options(url)
        return {name: parts[name] for name in ("password", "host", "username") if name in parts}

    @classmethod
    def _strip_protocol(cls, path):
        return fsspec.utils.infer_storage_options(path)["path"].rstrip("/")


@pytest.fixture
def guarded():
    fsspec.register_implementation("guarded", Guarded, clobber=True)


def test_file_systems(guarded, tmp_path, monkeypatch):
    files, path = open_url("guarded://bob:${DB_PASSWORD}@files/data")
    assert (files.password, files.host, files.username, path) == (SECRET, "files", "bob", "/data")
    files, path = open_url("guarded://bob:hunter2@files/data")
    assert (files.password, path) == ("hunter2", "/data")
    assert redaction.redacted("x hunter2") == "x ***"
    monkeypatch.setenv("FOLDER", str(tmp_path))
    assert open_url("${FOLDER}/x")[1] == f"{tmp_path}/x"


def test_a_state_store_keeps_the_reference(guarded):
    store = StateStore("guarded://bob:${DB_PASSWORD}@files/state")
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url == "guarded://bob:${DB_PASSWORD}@files/state"
    assert again._files.password == SECRET
    assert SECRET.encode() not in pickle.dumps(store)
    assert "hunter2" not in repr(StateStore("guarded://bob:hunter2@files/state"))
    assert str(ParquetStore("guarded://bob:hunter2@files/x")) == "Parquet files in guarded://bob:***@files/x"


def test_options_of_kafka():
    options = {"sasl.username": "bob", "sasl.password": "${DB_PASSWORD}", "ssl.key.password": "hunter2", "n": 3}
    assert connecting(options) == {**options, "sasl.password": SECRET}
    assert redaction.redacted(f"{SECRET} hunter2 bob") == "*** *** bob"
    connecting(
        {"ssl.key.pem": "-----BEGIN KEY-----\nMIISECRET\n-----END KEY-----", "ssl.certificate.pem": "MIIPUBLIC"}
    )
    assert redaction.redacted("bad key: MIISECRET, MIIPUBLIC") == "bad key: ***, MIIPUBLIC"


class Telling(BasicBolt):
    """Fails with an error that contains its configuration."""

    def prepare(self, conf, context):
        self.token = conf["token"]

    def execute(self, tup, collector):
        raise ValueError(self.token)


def test_components_get_resolved_values_and_their_errors_show_none(monkeypatch):
    builder = TopologyBuilder()
    builder.set_spout("numbers", NumberSpout(1))
    builder.set_bolt("tell", Telling()).shuffle_grouping("numbers")
    settings = Settings.parse(["conf.token=${DB_PASSWORD}"])
    topology = builder.build("secrets", settings)
    assert topology.settings.conf == {"token": "${DB_PASSWORD}"}
    runner = LocalRunner(topology)
    runner.run_until_idle()
    told = [str(error) for error in runner.errors]
    runner.close()
    assert told
    assert "ValueError: ***" in told[0]
    assert SECRET not in "".join(told)


@pytest.mark.parametrize("before", range(2300, 2520, 7))
def test_a_password_that_a_cut_would_split_is_hidden_first(before):
    """Long texts are shortened, and half of a password would not be recognised."""
    secret = "hunter2-" * 8
    told = str(blame("c", "execute", ValueError("x" * before + f" redis://:{secret}@h " + "y" * 9000)))
    assert "hunter2" not in told
    long = "x" * (before - 2250) + f" redis://:{secret}@h " + "y" * 900
    assert "hunter2" not in str(blame("c", "execute", ValueError("z"), (long,)))


def test_notes_and_reports_are_redacted():
    builder = TopologyBuilder()
    builder.set_spout("numbers", NumberSpout(1))
    bus = MetricsBus(make_plan(builder.build("x")))
    bus.note("scale", "", "not done: redis://:hunter2@h")
    bus.note_errors(["redis://:hunter2@h"])
    assert "hunter2" not in str(bus.notes()) + str(bus.last_errors()) + str(bus.take_errors())


# ---- command lines -------------------------------------------------------------------------------------


def test_a_secret_on_the_command_line_is_warned_of(caplog, capsys):
    log = logging.getLogger("penstock")
    handlers = log.handlers[:]
    log.handlers[:] = [redaction._redacting]  # handlers of earlier tests have closed streams
    try:
        assert main(["run", "/no/such.py", "--set", "monitor=postgresql://u:hunter2@db/x"]) == 2
    finally:
        log.handlers[:] = handlers
    assert "--set monitor: every user of this machine can read the password" in caplog.text
    assert "hunter2" not in caplog.text + capsys.readouterr().err


def test_which_assignments_show_a_secret():
    given = [
        "monitor=postgresql://u:x@h/d",
        "conf.api_token=x",
        "conf.token=${TOKEN}",
        "seed=3",
        "delivery.state_dir=s",
    ]
    assert literal_secrets(given) == ["monitor", "conf.api_token"]
    mixed = ["monitor=postgresql://u:x@h/${NAME}", "conf.token=x${TOKEN}", "conf.a=host=${HOST} password=x"]
    assert literal_secrets(mixed) == ["monitor", "conf.token", "conf.a"]
    references = [
        "monitor=postgresql://u:${P}@h/d",
        "conf.a=password='${P}' token=${T}${U}",
        "conf.token=${file:/x}",
    ]
    assert literal_secrets(references) == []


def test_the_list_of_processes_does_not_show_what_a_processor_is_told(tmp_path):
    store = PostgresStore("host=127.0.0.1 port=1 password=hunter2", "t")
    spec = ProcessorSpec("t", "c", EmbeddedQueue(), store, str(tmp_path), str(tmp_path / "dead"), 1.0, 10, 5.0)
    keeper = Keeper(spec.dumps(), lambda status: None)
    try:
        while keeper.pid is None or b"penstock" not in (shown := Path(f"/proc/{keeper.pid}/cmdline").read_bytes()):
            pass
        assert b"hunter2" not in shown + Path(f"/proc/{keeper.pid}/environ").read_bytes()
    finally:
        keeper.close(0.0)


def test_the_launch_of_a_query_does_not_show_the_secret_of_the_run():
    launch = QueryLaunch(0, None, (1,), False, None, ("127.0.0.1", 7077), b"secret of the run")
    assert "secret" not in repr(launch)
    assert "7077" in repr(launch)
