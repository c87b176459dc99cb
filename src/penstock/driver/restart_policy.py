"""How often and how soon a topology that was lost is started again."""

from __future__ import annotations

_STABLE = 600.0  # seconds of running after which earlier restarts no longer count against it
_WORKED = 1.0  # seconds of running after which a query run has worked: the next restart need not wait longer
_FIRST_BACK_OFF = 0.5  # seconds before the first restart; doubled after each attempt that failed
_MOST_DOUBLED = 10  # times: more than it takes to the longest
_LONGEST_BACK_OFF = 30.0  # seconds; ten restarts then outlast an outage of two minutes


class RestartPolicy:
    """Of one topology."""

    def __init__(self) -> None:
        self.count = 0
        """All there have been."""
        self.tries = 0
        """Those that count against it."""
        self._in_vain = 0

    def lost(self, ran: float) -> None:
        """A query run was lost that ran for so many seconds; less than 0: its tasks never opened."""
        if ran > _STABLE:
            self.tries = 0
        if ran > _WORKED:
            self._in_vain = 0

    def begin(self) -> None:
        """Another attempt begins."""
        self.count += 1
        self.tries += 1
        self._in_vain += 1

    @property
    def pause(self) -> float:
        """Seconds to wait before the next."""
        return min(_FIRST_BACK_OFF * (1 << min(self._in_vain, _MOST_DOUBLED)), _LONGEST_BACK_OFF)
