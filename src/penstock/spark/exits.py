"""Records how Python workers on this machine ended. Only their parent, Spark's Python daemon, knows: it writes a
line to its standard error, which the JVM passes on to this process."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict

LINE = "penstock-worker-exit {pid} {status}"
"""The line that the daemon writes."""
_LINE = re.compile(r"penstock-worker-exit (\d+) (-?\d+)\s*")
_MOST_STATUSES = 1000
"""Exit statuses to remember. More than the workers of one machine, so that those of the last query run are among
them."""

_changed = threading.Condition()
_statuses: OrderedDict[int, int] = OrderedDict()


def note_exit(line: str) -> bool:
    """Record the exit status in a line of the JVM's output. Returns False if the line contains none. Called by the
    thread that reads the output."""
    found = _LINE.fullmatch(line)
    if found is None:
        return False
    with _changed:
        _statuses[int(found[1])] = int(found[2])
        while len(_statuses) > _MOST_STATUSES:
            _statuses.popitem(last=False)
        _changed.notify_all()
    return True


def exit_status(pid: int, patience: float) -> int | None:
    """Return the exit status of a lost worker, as in ``subprocess``. Waits up to ``patience`` seconds for it; None
    if it is still unknown then. May be called by any thread."""
    with _changed:
        _changed.wait_for(lambda: pid in _statuses, patience)
        return _statuses.get(pid)
