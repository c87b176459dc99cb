"""Secrets and control characters do not leave a process."""

from __future__ import annotations

import io
import json
import logging
import pickle
import subprocess
import sys
import time

import pytest

from penstock import redaction
from penstock.errors import ComponentError
from penstock.redaction import described, hide, printable, redacted

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def no_hidden_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_hidden", ())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://bob:hunter2@db:5432/shop", "postgresql://bob:***@db:5432/shop"),
        ("redis://:hunter2@cache/0", "redis://:***@cache/0"),
        ("sftp://bob:hunter2@files/data", "sftp://bob:***@files/data"),
        ("at 'redis://bob:hunter2@cache', again", "at 'redis://bob:***@cache', again"),
        ("redis://a:hunter2@h,redis://b:hunter2@h", "redis://a:***@h"),
        ("postgresql://bob:hunter2@x@db/shop", "postgresql://bob:***@db/shop"),
        ("redis://bob:hunter2/x@cache", "redis://bob:***@cache"),
        ("postgresql://db/shop?user=bob&password=hunter2&sslmode=require", None),
        ("https://api/?key=hunter2", "https://api/?key=***"),
        ("https://store/x?sig=hunter2&se=1", "https://store/x?sig=***&se=1"),
        ("host=db password=hunter2 dbname=shop", "host=db password=*** dbname=shop"),
        ("host=db password='hunter2 \\' x' dbname=shop", "host=db password=*** dbname=shop"),
        ("host=db password = hunter2", "host=db password = ***"),
        ("password=it'hunter2 dbname=shop", "password=*** dbname=shop"),
        ("password=a&hunter2;x,y dbname=shop", "password=*** dbname=shop"),
        ("{'sasl.username': 'bob', 'sasl.password': 'hunter2'}", "{'sasl.username': 'bob', 'sasl.password': ***}"),
        ('{"ssl.key.password": "hunter2", "n": 1}', '{"ssl.key.password": ***, "n": 1}'),
        ("--set conf.api_token=hunter2", "--set conf.api_token=***"),
        ("aws_secret_access_key=hunter2", "aws_secret_access_key=***"),
        ("got 'conf.secret=hunter2'", "got 'conf.secret=***'"),
        ("Sink(dsn='host=h password=hunter2', table='t')", "Sink(dsn='host=h password=***', table='t')"),
        ("spark.authenticate.secret=hunter2", "spark.authenticate.secret=***"),
        ("Authorization: Bearer hunter2", "Authorization: Bearer ***"),
        ("Authorization: AWS4-HMAC-SHA256 Signature=hunter2hunter2hunter2", "Authorization: AWS4-HMAC-SHA256 ***"),
        ("password: hunter2", "password: ***"),
        ("password:hunter2", "password:***"),
        ("sasl.password: hunter2 (a file)", "sasl.password: *** (a file)"),
        ("x-api-key: hunter2", "x-api-key: ***"),
        ("api token: hunter2", "api token: ***"),
        ("client_secret => hunter2", "client_secret => ***"),
        ("('sasl.password', 'hunter2')", "('sasl.password', ***)"),
        ("[(b'sasl.password', b'hunter2'), (b'n', 1)]", "[(b'sasl.password', b***), (b'n', 1)]"),
        ('password="a hunter2', "password=***"),
        ("{'sasl.password': 'a hunter2 … cut", "{'sasl.password': ***"),
        (r'"{\"password\": \"a hunter2\", \"n\": 1}"', r'"{\"password\": ***, \"n\": 1}"'),
        ("postgresql://app:hun'hunter2@db/x", "postgresql://app:***@db/x"),
        ("postgresql://app:a'b@hunter2@db/x", "postgresql://app:***@db/x"),
        ('postgresql://app:hun"hunter2@db/x', "postgresql://app:***@db/x"),
        ("sftp://u:pa hunter2@h/x", "sftp://u:***@h/x"),
        ("sftp://u:pa x@hunter2@h/x", "sftp://u:***@h/x"),
        ("redis://u:99999/hunter2@h", "redis://u:***@h"),
        ("postgresql:///shop?user=a&password=it'hunter2", "postgresql:///shop?user=a&password=***"),
        ("https://h/x?X-Amz-Signature=hunter2&n=1", "https://h/x?X-Amz-Signature=***&n=1"),
        ("X-Amz-Signature=hunter2", "X-Amz-Signature=***"),
        ("ssl.key.pem=hunter2", "ssl.key.pem=***"),
        ("{'ssl.key.pem': '-----BEGIN\\nhunter2'}", "{'ssl.key.pem': ***}"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: x\n\nhunter2\n-----END RSA PRIVATE KEY-----\nmore",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nmore",
        ),
        ("-----BEGIN PRIVATE KEY-----\nhunter2, and cut", "-----BEGIN PRIVATE KEY-----***"),
    ],
)  # fmt: skip
def test_hides(text: str, shown: str | None) -> None:
    told = redacted(text)
    assert SECRET not in told
    assert "***" in told
    assert redacted(told) == told
    if shown is not None:
        assert told.startswith(shown)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://bob@db:5432/shop",
        "redis://cache:6379/0",
        "http://127.0.0.1:8080/users/@me",
        "spark://10.0.0.1:7077, user@host",
        "mode='insert', key=('word',)",
        "component 'tokenize' (wc.py:3): execute raised ValueError: unexpected token: ';'.",
        "the password must be set",
        "component 'x' (tokenizer.py:118 in execute): Unrecognized token: 'x'",
        "http://h:8080. Ask bob@example.org",
        "http://[::1]:8080/x, bob@example.org",
        "reads /etc/key.pem: no such file",
        "signature=(self, tup)",
    ],
)
def test_leaves_the_rest_as_it_is(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "part",
    [
        "a.",
        "a://b:",
        "password",
        "password=",
        "'password': '",
        "a:b@",
        "?key=",
        "password='",
        "\\'",
        "authorization: ",
        "x://",
        "a://b:c ",
        "a://b:' @",
        "a://b:" + "' " * 200,
        "session token",
        "password: ",
        'password="',
        "password='\\\n",
        "password=\\'",
        "('password', '",
        "('password',\"",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY----- ",
        "signature=a",
        "?signature",
    ],
)
def test_no_text_takes_long(part: str) -> None:
    """Errors contain users' data, which must not delay a worker."""
    text = ("://key" + part * (100_000 // len(part)))[:100_000]
    begun = time.process_time()
    redacted(text)
    assert time.process_time() - begun < 2.0


def test_hides_values_it_was_told_in_any_form() -> None:
    hide("p@ss w/rd")
    assert redacted('invalid port "p@ss w/rd"') == 'invalid port "***"'
    assert redacted("x p%40ss%20w%2Frd y") == "x *** y"
    hide("p@ss w/rd and more")
    assert redacted("p@ss w/rd and more") == "***"
    hide("abc")  # too short: it would occur in ordinary words
    assert redacted("abcissa") == "abcissa"


@pytest.mark.parametrize(
    "secret", ["p\"w'\\x", "it's s3cret", "two\\words", "pä$$wörd", "s3cret\x00\x1b", "caf\udce9-s3cret"]
)
def test_hides_values_as_repr_and_json_write_them(secret: str) -> None:
    hide(secret)
    encoded = secret.encode(errors="surrogateescape")
    values = {"a": secret, "b": f"{secret} '", "c": f'{secret} "', "d": f"{secret} '\""}
    for written in (str, repr, ascii, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)):
        for value in values.values():
            assert redacted(written(value)).count("***") == 1, written(value)
        assert redacted(written(values)).count("***") == 4
    for data in (encoded, encoded + b"'", encoded + b'"', encoded + b"'\""):
        assert redacted(str(data)).count("***") == 1, data


def test_hides_each_line_of_a_value() -> None:
    """The output of a worker and the errors of a parser show single lines."""
    hide("-----BEGIN KEY-----\r\n  MIIEvQIBADANBg\nkqhkiG9w0BAQEF\ntrue\n-----END KEY-----\n")
    assert redacted("line 2: MIIEvQIBADANBg") == "line 2: ***"
    assert redacted("b'kqhkiG9w0BAQEF'") == "b'***'"
    assert redacted("true") == "true"


def test_no_part_of_an_error_has_a_secret_also_when_pickled() -> None:
    error = ComponentError("redis://:hunter2@h", "password=hunter2 redis://:hunter2@h", "token=hunter2")
    assert SECRET not in str(error) + repr(error) + repr(pickle.loads(pickle.dumps(error)).args)
    assert SECRET.encode() not in pickle.dumps(error)
    assert SECRET not in "".join((error.where, error.problem, error.hint))


def _warn() -> None:
    try:
        raise OSError("cannot reach redis://:hunter2@h")
    except OSError:
        logging.getLogger("penstock.of.a.test").warning(
            "lost %s (%d)", "postgresql://a:hunter2@h", 3, exc_info=True
        )


def test_log_records_are_redacted_with_their_tracebacks_before_any_handler_sees_them() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        _warn()
    finally:
        logging.getLogger().removeHandler(handler)
    said = stream.getvalue()
    assert SECRET not in said
    assert "lost postgresql://a:***@h (3)" in said
    assert "OSError: cannot reach redis://:***@h" in said


def test_without_other_handlers_logs_go_to_standard_error_as_usual_and_redacted() -> None:
    code = "import penstock, tests.unit.test_redaction as t; t._warn(); t.logging.getLogger('penstock').info('no')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert SECRET not in done.stderr
    assert done.stderr.count("lost postgresql://a:***@h (3)") == 1
    assert "no\n" not in done.stderr


def test_tracebacks_of_own_processes_are_redacted() -> None:
    code = (
        "import threading; from penstock.redaction import redact_tracebacks; redact_tracebacks()\n"
        "def fail(): raise OSError('redis://:hunt' + 'er2@h')\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join(); fail()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("OSError: redis://:***@h") == 2
    assert SECRET not in done.stderr


def test_tracebacks_and_logs_of_own_processes_cannot_steer_the_terminal() -> None:
    code = (
        "import logging, penstock; from penstock.redaction import redact_tracebacks; redact_tracebacks()\n"
        "log = logging.getLogger('penstock.x'); sent = chr(27) + '[2J'\n"
        "log.warning('sent %s', sent)\n"
        "try: raise OSError(sent)\n"
        "except OSError: log.exception('failed')\n"
        "raise OSError(sent)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "\x1b" not in done.stderr
    assert done.stderr.count("sent \\x1b[2J\n") == 1
    assert done.stderr.count("OSError: \\x1b[2J\n") == 2


def test_describes_any_exception() -> None:
    assert described(ValueError("redis://:hunter2@h")) == "ValueError: redis://:***@h"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb\tc", "a b c"),
        ("a\rb\x7f\x9b1m", "a\\rb\\x7f\\x9b1m"),
        ("\u202eevil", "\\u202eevil"),
        ("\udc80", "\\udc80"),
        ("grüße 東京 🙂", "grüße 東京 🙂"),
    ],
)
def test_printable_leaves_nothing_a_terminal_acts_upon(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_printable_keeps_lines_where_asked() -> None:
    assert printable("a\n\tb\x1b", multiline=True) == "a\n\tb\\x1b"
