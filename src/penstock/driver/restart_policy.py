"""Decides how soon a lost topology is restarted, and counts its restarts."""

from __future__ import annotations

_STABLE = 600.0
"""Seconds that a query run must have run so that earlier restarts no longer count towards the limit."""
_WORKED = 1.0
"""Seconds that a query run must have run to count as successful. The next pause is the shortest one again."""
_FIRST_BACK_OFF = 0.5
"""Seconds before the second of two restarts in a row. The pause doubles after each failed attempt. The first
restart does not wait: most losses do not repeat, and the pause would be a third of the time without output."""
_MOST_DOUBLED = 10
"""Maximum number of doublings, which keeps the number small. The longest pause needs only six."""
_LONGEST_BACK_OFF = 30.0
"""Longest pause in seconds. The default of ten restarts then survives an outage of two minutes."""


class RestartPolicy:
    """The restarts of one topology. Called on one thread."""

    def __init__(self) -> None:
        self.count = 0
        """Number of all restarts."""
        self.tries = 0
        """Number of restarts that count towards ``lifecycle.max_restarts``."""
        self._failed_attempts = 0

    def lost(self, ran: float) -> None:
        """Called when a query run was lost. ``ran``: seconds for which it ran; less than 0 if its tasks were never
        open."""
        if ran > _STABLE:
            self.tries = 0
        if ran > _WORKED:
            self._failed_attempts = 0

    def begin(self) -> None:
        """Called when a restart begins."""
        self.count += 1
        self.tries += 1
        self._failed_attempts += 1

    @property
    def pause(self) -> float:
        """Seconds to wait before the next restart."""
        if self._failed_attempts == 0:
            return 0.0
        return min(_FIRST_BACK_OFF * (1 << min(self._failed_attempts - 1, _MOST_DOUBLED)), _LONGEST_BACK_OFF)
