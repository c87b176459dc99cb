"""What the Kafka components share: loading the client library, its settings, and its errors in our words."""

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
"""How long a broker may take to answer while a task starts: a restarted one is back within 10 s."""


def client_library() -> Any:
    """The module ``confluent_kafka``: loaded where it is used, so that building a topology does not need it."""
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
    """The options for a client that connects now: references (``penstock.credentials``) resolved, passwords hidden
    from errors and logs."""
    ready: dict[str, Any] = resolved_values(dict(options), "Kafka options")
    for name, value in ready.items():
        if isinstance(value, str) and redacted(f"{name}=value") != f"{name}=value":
            hide(value)
    return ready


def where(component: str, task: int) -> str:
    return f"component '{component}' (task {task})"


class BrokerErrors:
    """What the client library reports on its own: brokers gone, requests refused. It goes on trying, so these are
    counted, and logged once per kind until ``clear``. ``check`` raises the hopeless ones: callbacks cannot."""

    def __init__(self, where: str, bootstrap: str) -> None:
        self._where, self._bootstrap = where, bootstrap
        self._logged: set[str] = set()
        self._fatal: Any = None
        self.counts: Counter[str] = Counter()
        """How often each kind came, by Kafka's own names."""

    def note(self, error: Any) -> None:
        """The library's ``error_cb``, and for errors it hands over instead of a record."""
        self.counts[error.name()] += 1
        if error.fatal() or error.name() in _HOPELESS:
            self._fatal = error
        elif error.name() not in self._logged:
            self._logged.add(error.name())
            log.warning("%s: Kafka at %s: %s; trying on", self._where, self._bootstrap, error.str())

    def clear(self) -> None:
        """It works again: the next error is news."""
        if self._logged:
            log.warning("%s: Kafka at %s works again", self._where, self._bootstrap)
            self._logged.clear()

    def check(self) -> None:
        if self._fatal is not None:
            raise refused(self._where, self._bootstrap, self._fatal)


_HOPELESS = {  # the same request will be refused again: a person has to do something
    "TOPIC_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "SASL_AUTHENTICATION_FAILED",
    "_AUTHENTICATION",
}


def library_error(raised: BaseException) -> Any:
    """The ``KafkaException`` that something raised is, or hides: after a fatal error the library calls a delivery
    callback with an exception set, and Python makes a ``SystemError`` of that. Raises what is neither."""
    kafka = client_library()
    found: BaseException | None = raised
    while found is not None:
        if isinstance(found, kafka.KafkaException):
            return found
        found = found.__cause__ or found.__context__
    raise raised


def fenced(error: Any) -> bool:
    """A newer owner has the transactional id: another process asked for it, or Kafka itself counted it up when it
    ended a transaction that was open for longer than ``transaction.timeout.ms``. A producer cannot tell which.
    Brokers before 2.7 say INVALID_PRODUCER_EPOCH for PRODUCER_FENCED; librdkafka turns both into _FENCED where
    it makes them fatal. Not among them: INVALID_PRODUCER_ID_MAPPING and UNKNOWN_PRODUCER_ID (the id was forgotten
    after a week without use) and CONCURRENT_TRANSACTIONS (the one before is still ending), which aborting or
    asking again mends."""
    return error.name() in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")


def refused(where: str, bootstrap: str, error: Any) -> ComponentError:
    """An error no retry mends, in three parts."""
    if fenced(error):
        hint = (
            "Another run of this topology uses the same transactional id: end one of them. If there is none, "
            "Kafka gave up a transaction that was open for too long; starting again mends that."
        )
    elif error.name() in _HOPELESS:
        hint = "Give the client the right credentials (options={'sasl.username': ...}) and rights."
    else:
        hint = f"Kafka calls this {error.name()}; its documentation says what can be done."
    return ComponentError(f"{where}, Kafka at {bootstrap}", f"Kafka refused the request: {error.str()}", hint)


def no_answer(where: str, bootstrap: str, problem: str) -> SystemAway:
    return SystemAway(
        f"{where}, Kafka at {bootstrap}",
        problem,
        "Check the address, that the brokers run, and that the topic exists.",
    )


def ask(where: str, bootstrap: str, question: Callable[[float], Any], seconds: float = ANSWER_SECONDS) -> Any:
    """Call ``question(timeout)`` until Kafka answers: brokers that are starting refuse for a while. Blocks: only
    for the start of a task and for sinks, which have nothing else to do."""
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
                time.sleep(0.05)  # it answered at once that it cannot yet
        except TimeoutError as failed:  # of a future; concurrent.futures' is the built-in one
            if time.monotonic() >= deadline:
                raise no_answer(where, bootstrap, f"the brokers did not answer within {seconds:.0f} s") from failed
