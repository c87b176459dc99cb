"""Savepoints that are requested by a file in the state directory. Any machine that can access the directory can
request one, without connecting to the driver.

``requests/NAME.json`` names the target of the copy; the answer is ``requests/NAME.done``. A request is signed with
the deployment key. Otherwise, anyone who can write to the directory could have the state, and secrets that a URL
refers to, sent to a place of their choice.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
from dataclasses import replace
from typing import Any

from penstock import signing
from penstock.driver.commits import read_published
from penstock.errors import PenstockError, StateError
from penstock.redaction import described
from penstock.state import manifest as manifests
from penstock.state import savepoints
from penstock.state.manifest import TaskEntry
from penstock.state.store import StateStore
from penstock.texts import parse_json

log = logging.getLogger("penstock.commits")

_INTERVAL = 1.0  # seconds between two searches for files, because each is a request to the store
REQUESTS = "requests"
_PURPOSE = "state.request"


class SavepointRequests:
    """The request files of one state directory. Called by the loop that commits epochs."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._looked = 0.0
        self._seen: set[str] = set()

    def new(self, now: float) -> list[tuple[str, str]]:
        """Return the requests that arrived since the last call: the file name and the target of each. Invalid
        requests are answered with an error and left out."""
        if now - self._looked <= _INTERVAL:
            return []
        self._looked = now
        try:
            found = [name for name in self._store.list(f"{REQUESTS}/") if name.endswith(".json")]
        except StateError as error:
            log.warning("requests for savepoints could not be listed: %s", error)
            return []
        fresh = [name for name in found if name not in self._seen]
        self._seen.update(fresh)
        return [(name, target) for name in fresh if (target := self._read(name))]

    def save(self, name: str, target: str, error: PenstockError | None, published: int) -> int:
        """Carry out a request, unless there is an ``error``, and answer it. Returns ``published``, the newest
        epoch that all sinks have published."""
        answer: dict[str, Any]
        try:
            if error is not None:
                raise error
            answer = {"epoch": save(self._store, StateStore(target), published)}
        except Exception as failed:  # the file system behind the target may raise anything
            answer = {"error": str(failed) if isinstance(failed, PenstockError) else described(failed)}
        self._answer(name, answer)
        return published

    def _read(self, name: str) -> str:
        try:
            return _requested(name, self._store.read(name))
        except (StateError, ValueError, LookupError, TypeError) as error:  # anyone may put a file there
            text = f"it names no folder or URL, or lacks this deployment's signature: {error}"
            self._answer(name, {"error": str(StateError(f"request {name}", text))})
            return ""

    def _answer(self, name: str, answer: dict[str, Any]) -> None:
        """Write the answer to a request. An error is only logged, because it must not end the topology."""
        try:
            self._store.write(f"{name.removesuffix('.json')}.done", json.dumps(answer).encode())
            self._store.remove(name)
            self._seen.discard(name)
        except StateError as error:
            log.warning("the answer to %s could not be written: %s", name, error)


def request(name: str, target: str) -> bytes:
    """Return the content of the request file ``name`` for a copy to ``target``, an absolute path or URL."""
    return json.dumps({"to": target, "signature": _signature(name, target).hex()}).encode()


def _signature(name: str, target: str) -> bytes:
    return signing.sign(_PURPOSE, f"{name}\0{target}".encode())


def _requested(name: str, data: bytes) -> str:
    """Return the target of a request. Raises ``ValueError``, ``LookupError`` or ``TypeError`` if ``request`` did
    not make this content, or if the path is relative: only the sender knows the folder that it is relative to."""
    content = parse_json(data)
    target = str(content["to"])
    if not hmac.compare_digest(bytes.fromhex(content["signature"]), _signature(name, target)):
        raise ValueError("a request that was signed with another key, or changed")
    if "://" not in target and not os.path.isabs(target):
        raise ValueError(f"a relative path: {target}")
    return target


def save(store: StateStore, target: StateStore, published: int) -> int:
    """Copy the newest epoch that all sinks have published, and return its number. The copy does not need the
    tokens of sinks. Raises ``StateError`` if there is no such epoch."""
    manifest = manifests.newest(store, before=published + 1)
    if manifest is None or not manifest.epoch:
        hint = "Wait until its sinks have published an epoch, or check --state-dir."
        raise StateError(f"state directory {store.url}", "it holds no published epoch", hint)
    tasks = {key: TaskEntry(entry.parts, []) for key, entry in manifest.tasks.items()}
    savepoints.write_savepoint(store, replace(manifest, tasks=tasks), target)
    return manifest.epoch


def save_at_rest(store: StateStore, target: StateStore) -> int:
    """Like ``save``, for a topology that does not run. Raises ``StateError`` if its sinks have not published the
    newest epoch."""
    newest = manifests.newest(store)
    if newest is None or not newest.epoch:
        hint = "Start the topology until it has committed an epoch, or check --state-dir."
        raise StateError(f"state directory {store.url}", "it holds no committed epoch", hint)
    published = read_published(store, newest.generation)
    if published < newest.epoch and any(entry.tokens for entry in newest.tasks.values()):
        raise StateError(
            f"topology '{newest.topology}'",
            f"its sinks have published epoch {published} only, and not yet epoch {newest.epoch}",
            "Start it once more, and end it with Ctrl-C.",
        )
    return save(store, target, newest.epoch)
