"""``penstock savepoint TOPOLOGY TARGET``: a copy of a topology's state to start from later."""

from __future__ import annotations

import argparse
import secrets
import time

from penstock.cli.terminal import Terminal
from penstock.driver.savepoint_requests import REQUESTS, request, save_at_rest
from penstock.errors import NotRunning, StateError, StateMissing
from penstock.redaction import printable, redacted
from penstock.settings import Settings
from penstock.state.generations import newest_generation
from penstock.state.lease import LeaseHolder
from penstock.state.store import StateStore
from penstock.texts import parse_json

_POLL = 0.2  # seconds between two looks for the answer
_LOOK = 1.0  # seconds between two looks at whether the topology is alive


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "savepoint",
        help="copy a topology's state, to start from later",
        description="A running topology commits an epoch and copies it; one at rest has its last epoch copied. "
        "Begin from it with penstock run FILE --from TARGET.",
    )
    parser.add_argument("topology", help="the topology's name")
    parser.add_argument("target", help="where to: a path or fsspec URL")
    parser.add_argument(
        "--state-dir",
        default=Settings().delivery.state_dir,
        help="the topology's setting of that name (default: %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for it (default: 60)")
    parser.add_argument("--at-rest", action="store_true", help="the topology does not run: copy its last epoch")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    store = StateStore(options.state_dir).child(options.topology)
    store.check_owner()
    if not newest_generation(store):
        raise StateMissing(
            f"topology '{options.topology}'",
            f"{options.state_dir} holds no state of it",
            "Check the topology's name and --state-dir. A topology with delivery=at_most_once keeps no state.",
        )
    console = Terminal()
    if options.at_rest:
        epoch = save_at_rest(store, StateStore(options.target))
    else:
        with console.status("asking the topology …"):
            epoch = _ask(store, options)
    done = printable(f"epoch {epoch} of '{options.topology}' is in {redacted(options.target)}")
    console.print(done, markup=False, highlight=False, soft_wrap=True)
    return 0


def _ask(store: StateStore, options: argparse.Namespace) -> int:
    """Leave a request and wait for the answer: the topology may run on another machine. However this ends, the
    request is gone: a later start of the topology must not carry it out."""
    owner = LeaseHolder(store, time.monotonic)
    if not owner.may_live():
        raise _not_running(options.topology)
    name = f"{REQUESTS}/{secrets.token_hex(8)}"
    target = StateStore(options.target).url  # a relative path is one of this process, not of the topology's
    try:
        store.write(f"{name}.json", request(f"{name}.json", target))
        return _answer(store, f"{name}.done", owner, options)
    finally:
        store.remove(f"{name}.json")
        store.remove(f"{name}.done")


def _answer(store: StateStore, name: str, owner: LeaseHolder, options: argparse.Namespace) -> int:
    begun = looked = time.monotonic()
    while True:
        if name in store.list(f"{REQUESTS}/"):
            answer = parse_json(store.read(name))
            if "error" in answer:
                raise StateError(f"topology '{options.topology}'", f"it made no savepoint: {answer['error']}")
            return int(answer["epoch"])
        now = time.monotonic()
        if now - looked >= _LOOK:
            looked = now
            if not owner.may_live():
                raise _not_running(options.topology)
        if now - begun >= options.timeout:
            raise StateError(
                f"topology '{options.topology}'",
                f"it did not answer within {options.timeout:g} s",
                "Give it more time with --timeout, or see penstock status.",
            )
        time.sleep(_POLL)


def _not_running(topology: str) -> NotRunning:
    return NotRunning(
        f"topology '{topology}'", "it is not running", "Add --at-rest to copy the last epoch it committed."
    )
