"""How often and how soon a topology that was lost is started again."""

from __future__ import annotations

_STABLE = 600.0  # seconds of running after which earlier restarts no longer count against it
_WORKED = 1.0  # seconds of running after which a start was not in vain: the next need not wait longer
_FIRST_BACK_OFF = 0.5  # seconds before the first restart; doubled for each one that was in vain
_MOST_DOUBLED = 10  # times: more than it takes to the longest
_LONGEST_BACK_OFF = 30.0  # seconds; ten restarts then outlast an outage of two minutes


class Restarts:
    """Of one topology."""

    def __init__(self) -> None:
        self.count = 0
        """All there have been."""
        self.tries = 0
        """Those that count against it."""
        self._in_vain = 0

    def lost(self, ran: float) -> None:
        """A start was lost that ran for so many seconds; less than 0: it never did."""
        if ran > _STABLE:
            self.tries = 0
        if ran > _WORKED:
            self._in_vain = 0

    def begin(self) -> None:
        """It is started again."""
        self.count += 1
        self.tries += 1
        self._in_vain += 1

    @property
    def pause(self) -> float:
        """Seconds to wait before the next."""
        return min(_FIRST_BACK_OFF * (1 << min(self._in_vain, _MOST_DOUBLED)), _LONGEST_BACK_OFF)
