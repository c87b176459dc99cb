"""Loads the Kafka client library, prepares its options, and turns its errors into Penstock's errors."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from penstock.credentials import resolved_values
from penstock.errors import ComponentError, EnvironmentFault, SystemAway
from penstock.redaction import hide, redacted

log = logging.getLogger("penstock.connectors.kafka")

Options = Mapping[str, Any]
ANSWER_SECONDS = 30.0
"""Seconds that a broker may take to answer while a task starts: a restarted broker is back within 10 s."""


def client_library() -> Any:
    """The module ``confluent_kafka``. Loaded on first use, so that building a topology does not need it. Raises
    ``EnvironmentFault`` if it is not installed."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError:
        raise EnvironmentFault(
            "Kafka connector",
            "the package confluent-kafka is not installed",
            'Install it with: pip install "penstock[kafka]".',
        ) from None
    return confluent_kafka


def connecting(options: Options) -> dict[str, Any]:
    """The options for a client that is about to connect: references (see ``penstock.credentials``) are resolved
    and passwords are hidden from errors and logs."""
    ready: dict[str, Any] = resolved_values(dict(options), "Kafka options")
    for name, value in ready.items():
        if isinstance(value, str) and redacted(f"{name}=value") != f"{name}=value":
            hide(value)
    return ready


def where(component: str, task: int) -> str:
    return f"component '{component}' (task {task})"


class BrokerErrors:
    """Collects the errors that the client library reports through a callback, such as lost brokers and refused
    requests. The library retries by itself, so errors are counted, and logged once per kind until ``clear``.
    ``check`` raises those that no retry resolves, since a callback cannot raise."""

    def __init__(self, where: str, bootstrap: str) -> None:
        self._where, self._bootstrap = where, bootstrap
        self._logged: set[str] = set()
        self._fatal: Any = None
        self.counts: Counter[str] = Counter()
        """The number of errors of each kind, by Kafka's names."""

    def note(self, error: Any) -> None:
        """The library's ``error_cb``; also called for errors that it returns in place of a record."""
        self.counts[error.name()] += 1
        if error.fatal() or error.name() in _HOPELESS:
            self._fatal = error
        elif error.name() not in self._logged:
            self._logged.add(error.name())
            log.warning("%s: Kafka at %s: %s; retrying", self._where, self._bootstrap, error.str())

    def clear(self) -> None:
        """Kafka works again, so the next error of each kind is logged."""
        if self._logged:
            log.warning("%s: Kafka at %s works again", self._where, self._bootstrap)
            self._logged.clear()

    def check(self) -> None:
        """Raise ``ComponentError`` if an error was reported that no retry resolves."""
        if self._fatal is not None:
            raise refused(self._where, self._bootstrap, self._fatal)


_HOPELESS = {  # errors that repeat until an operator changes something
    "TOPIC_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "SASL_AUTHENTICATION_FAILED",
    "_AUTHENTICATION",
}


def library_error(raised: BaseException) -> Any:
    """Find the ``KafkaException`` in an exception or its causes; raise the exception itself if there is none.

    After a fatal error the library calls a delivery callback while an exception is set, and Python turns this into
    a ``SystemError``.
    """
    kafka = client_library()
    found: BaseException | None = raised
    while found is not None:
        if isinstance(found, kafka.KafkaException):
            return found
        found = found.__cause__ or found.__context__
    raise raised


def fenced(error: Any) -> bool:
    """True if the transactional id has a newer owner: another process initialised it, or Kafka raised its epoch
    when it ended a transaction that was open for longer than ``transaction.timeout.ms``. A producer cannot tell
    which.

    Brokers before 2.7 report INVALID_PRODUCER_EPOCH instead of PRODUCER_FENCED; librdkafka reports both as _FENCED
    where it treats them as fatal. INVALID_PRODUCER_ID_MAPPING and UNKNOWN_PRODUCER_ID (the id was forgotten after
    a week without use) and CONCURRENT_TRANSACTIONS (the previous one is still ending) are not among them: aborting
    the transaction or retrying resolves these.
    """
    return error.name() in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")


def refused(where: str, bootstrap: str, error: Any) -> ComponentError:
    """The error for a refusal that no retry resolves."""
    if fenced(error):
        hint = (
            "Another run of this topology uses the same transactional id: stop one of them. If there is none, "
            "Kafka ended a transaction that was open for too long; restart the topology."
        )
    elif error.name() in _HOPELESS:
        hint = "Give the client credentials (options={'sasl.username': ...}) with the necessary rights."
    else:
        hint = f"Kafka calls this error {error.name()}; see its documentation."
    return ComponentError(f"{where}, Kafka at {bootstrap}", f"Kafka refused the request: {error.str()}", hint)


def no_answer(where: str, bootstrap: str, problem: str) -> SystemAway:
    return SystemAway(
        f"{where}, Kafka at {bootstrap}",
        problem,
        "Check the address, that the brokers are running, and that the topic exists.",
    )


def ask(where: str, bootstrap: str, question: Callable[[float], Any], seconds: float = ANSWER_SECONDS) -> Any:
    """Call ``question(timeout)`` until Kafka answers: brokers that are starting refuse requests for a while.
    Blocks, so it is only for starting a task and for sinks. Raises ``ComponentError`` for an error that no retry
    resolves and ``SystemAway`` if there is no answer within ``seconds``."""
    kafka = client_library()
    deadline = time.monotonic() + seconds
    while True:
        try:
            return question(min(5.0, max(0.1, deadline - time.monotonic())))
        except kafka.KafkaException as failed:
            error = failed.args[0]
            if error.name() in _HOPELESS or error.fatal():
                raise refused(where, bootstrap, error) from failed
            if time.monotonic() >= deadline:
                raise no_answer(
                    where, bootstrap, f"the brokers did not answer within {seconds:.0f} s ({error.str()})"
                ) from failed
            if error.name() not in ("_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN"):
                time.sleep(0.05)  # the broker refused at once: do not retry in a busy loop
        except TimeoutError as failed:  # raised by a future
            if time.monotonic() >= deadline:
                raise no_answer(where, bootstrap, f"the brokers did not answer within {seconds:.0f} s") from failed
