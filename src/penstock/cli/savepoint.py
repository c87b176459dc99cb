"""``penstock savepoint TOPOLOGY TARGET``: a copy of a topology's state to start from later."""

from __future__ import annotations

import argparse
import secrets
import time

from penstock.cli.terminal import Terminal
from penstock.coordinator.commit_thread import REQUESTS, request, save_at_rest
from penstock.errors import StateError
from penstock.redaction import printable, redacted
from penstock.settings import Settings
from penstock.state.store import StateStore
from penstock.texts import parse_json


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
        default=Settings().state_dir,
        help="the topology's setting of that name (default: %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for it (default: 60)")
    parser.add_argument("--at-rest", action="store_true", help="the topology does not run: copy its last epoch")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    store = StateStore(options.state_dir).child(options.topology)
    if not store.list("generations/"):
        raise StateError(
            f"topology '{options.topology}'",
            f"must have run with state_dir={options.state_dir}",
            "nothing there",
            "Check --state-dir and the topology's name; at most once there is no state.",
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
    """Leave a request and wait for the answer: the topology may run on another machine."""
    name = f"{REQUESTS}/{secrets.token_hex(8)}"
    target = StateStore(options.target).url  # a relative path is one of this process, not of the topology's
    store.write(f"{name}.json", request(f"{name}.json", target))
    deadline = time.monotonic() + options.timeout
    while time.monotonic() < deadline:
        if f"{name}.done" in store.list(f"{REQUESTS}/"):
            answer = parse_json(store.read(f"{name}.done"))
            store.remove(f"{name}.done")
            if "error" in answer:
                raise StateError(f"topology '{options.topology}'", "a savepoint must succeed", answer["error"])
            return int(answer["epoch"])
        time.sleep(0.2)
    store.remove(f"{name}.json")
    raise StateError(
        f"topology '{options.topology}'",
        f"must answer within {options.timeout:g} s",
        "no answer",
        "If it does not run, say --at-rest.",
    )
