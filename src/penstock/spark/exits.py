"""How Python workers of this machine ended. Their parent, Spark's daemon, is the only process that can know; it
writes a line to its standard error, which passes through the JVM to us."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict

LINE = "penstock-worker-exit {pid} {status}"
_LINE = re.compile(r"penstock-worker-exit (\d+) (-?\d+)\s*")
_KEPT = 1000  # processes; the newest of all restarts

_changed = threading.Condition()
_statuses: OrderedDict[int, int] = OrderedDict()


def note_exit(line: str) -> bool:
    """Take a line of the JVM's output. False: it is not about the end of a process."""
    found = _LINE.fullmatch(line)
    if found is None:
        return False
    with _changed:
        _statuses[int(found[1])] = int(found[2])
        while len(_statuses) > _KEPT:
            _statuses.popitem(last=False)
        _changed.notify_all()
    return True


def exit_status(pid: int, patience: float) -> int | None:
    """Of a worker that was lost, as ``subprocess`` has it; waits for the line so many seconds. None: nobody
    said."""
    with _changed:
        _changed.wait_for(lambda: pid in _statuses, patience)
        return _statuses.get(pid)
