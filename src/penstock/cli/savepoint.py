"""``penstock savepoint TOPOLOGY TARGET``: copy a topology's state, to start from the copy later."""

from __future__ import annotations

import argparse
import secrets
import time

from penstock.cli.terminal import Terminal
from penstock.driver.savepoint_requests import REQUESTS, request, save_at_rest
from penstock.errors import NotRunning, SettingError, StateError, StateMissing
from penstock.redaction import printable, redacted
from penstock.settings import Settings
from penstock.state.generations import newest_generation
from penstock.state.lease import LeaseHolder
from penstock.state.store import StateStore
from penstock.texts import parse_json

_POLL_INTERVAL = 0.2  # seconds between two checks for the answer
_ALIVE_INTERVAL = 1.0  # seconds between two checks whether the topology is alive; each reads the lease file


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "savepoint",
        help="copy a topology's state, to start from the copy later",
        description="A running topology commits an epoch and copies it. With --at-rest the last committed epoch "
        "of a stopped topology is copied. Start from a savepoint with penstock run FILE --from TARGET.",
    )
    parser.add_argument("topology", help="the topology's name")
    parser.add_argument("target", help="where to write the savepoint: a path or an fsspec URL")
    parser.add_argument(
        "--state-dir",
        default=Settings().delivery.state_dir,
        help="the topology's delivery.state_dir (default: %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="time limit in seconds (default: 60)")
    parser.add_argument("--at-rest", action="store_true", help="the topology is stopped: copy its last epoch")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    store = StateStore(options.state_dir).child(options.topology)
    store.check_owner()
    if not newest_generation(store):
        raise StateMissing(
            f"topology '{options.topology}'",
            f"{options.state_dir} contains no state of it",
            "Check the topology's name and --state-dir. A topology with delivery=at_most_once keeps no state.",
        )
    target = StateStore(options.target)
    if StateStore(options.state_dir).overlaps(target):
        raise SettingError(
            f"savepoint {target.url}",
            f"it overlaps with the state directory {options.state_dir}",
            "Choose a folder outside of it.",
        )
    console = Terminal()
    if options.at_rest:
        epoch = save_at_rest(store, target)
    else:
        with console.status("waiting for the topology …"):
            epoch = _ask(store, options)
    done = printable(f"epoch {epoch} of '{options.topology}' is saved in {redacted(options.target)}")
    console.print(done, markup=False, highlight=False, soft_wrap=True)
    return 0


def _ask(store: StateStore, options: argparse.Namespace) -> int:
    """Write a request into the state directory and wait for the answer; the topology may run on another machine.
    The request is removed in every case, so that a later run of the topology does not carry it out."""
    owner = LeaseHolder(store, time.monotonic)
    if not owner.may_live():
        raise _not_running(options.topology)
    name = f"{REQUESTS}/{secrets.token_hex(8)}"
    target = StateStore(options.target).url  # absolute: the topology may run in another folder
    try:
        store.write(f"{name}.json", request(f"{name}.json", target))
        return _answer(store, f"{name}.done", owner, options)
    finally:
        store.remove(f"{name}.json")
        store.remove(f"{name}.done")


def _answer(store: StateStore, name: str, owner: LeaseHolder, options: argparse.Namespace) -> int:
    begun = checked = time.monotonic()
    while True:
        if name in store.list(f"{REQUESTS}/"):
            answer = parse_json(store.read(name))
            if "error" in answer:
                raise StateError(f"topology '{options.topology}'", f"it made no savepoint: {answer['error']}")
            return int(answer["epoch"])
        now = time.monotonic()
        if now - checked >= _ALIVE_INTERVAL:
            checked = now
            if not owner.may_live():
                raise _not_running(options.topology)
        if now - begun >= options.timeout:
            raise StateError(
                f"topology '{options.topology}'",
                f"it did not answer within {options.timeout:g} s",
                "Allow more time with --timeout, or see penstock status.",
            )
        time.sleep(_POLL_INTERVAL)


def _not_running(topology: str) -> NotRunning:
    return NotRunning(
        f"topology '{topology}'", "it is not running", "Add --at-rest to copy the last epoch it committed."
    )
