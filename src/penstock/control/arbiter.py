"""Decides which policy may change the running topology now, so that policies do not undo each other's work. Pure.

Scaling changes the number of executors, refitting the workers that they share, placement the nodes of the workers.
Each looks at its own figures only, and a change by one of them changes the figures of the others.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum

from penstock.errors import SettingError


class ChangeSource(Enum):
    """Who wants to change the topology."""

    SCALING = "scaling"
    REFIT = "refitting"
    PLACEMENT = "placement"
    OPERATOR = "the operator"


PRIORITY = (ChangeSource.SCALING, ChangeSource.REFIT, ChangeSource.PLACEMENT)
"""The policies, the most important first. Scaling decides whether the topology can process its load at all;
refitting presumes the number of executors, and placement the number and the load of the workers."""


class Arbiter:
    """Permits changes to policies. A policy asks with each proposal and carries it out at once if it is permitted;
    after a refusal it asks again with its next proposal. The operator is never refused.

    - Whatever the operator does, all policies wait ``settle`` seconds afterwards.
    - A policy waits ``settle`` seconds after a change by a policy of higher priority, because its samples would
      mix what was before and after. It does not wait after changes by policies of lower priority.
    - Policies undo each other if one acts, then another, then the first one again, each at most ``conflict``
      seconds after it could. This doubles the wait of the one that acts again, up to ``longest`` seconds, and it
      then waits after changes by all other policies. When it has had no conflict for ``calm`` seconds more than
      its wait, its next change resets the wait.
    - A policy changes the topology at most ``most_per_hour`` times an hour.
    - A policy that has asked in vain for ``longest`` seconds is permitted, unless it has used up its changes of
      the hour. So others that act often cannot keep it from acting for ever. The count begins again if it did not
      ask for ``conflict`` seconds.
    """

    def __init__(
        self,
        settle: float = 60.0,
        conflict: float = 600.0,
        longest: float = 3600.0,
        calm: float = 3600.0,
        most_per_hour: int = 20,
    ) -> None:
        """``settle``: six samples of 10 s. ``conflict``: twice the first cool-down of refitting, so that policies
        that answer each other after their cool-downs are noticed. ``longest``: two policies that disagree for ever
        then cost two pauses an hour. ``calm``: longer than ``conflict``, so that the load of one hour cannot reset
        the wait several times. ``most_per_hour``: a policy that changes the topology every three minutes does not
        work. Scaling a bolt from 1 to 64 tasks takes six doublings."""
        _check("the settling time", settle, "more than 0 s", 0 < settle < math.inf)
        _check(
            "the longest wait", longest, f"at least the settling time, {settle} s", settle <= longest < math.inf
        )
        _check("the time between conflicts", conflict, "0 s or more", 0 <= conflict < math.inf)
        _check("the calm time", calm, f"at least {conflict} s", conflict <= calm < math.inf)
        _check("the changes per hour", most_per_hour, "at least 1", most_per_hour >= 1)
        self._settle, self._conflict, self._longest, self._calm = settle, conflict, longest, calm
        self._last: dict[ChangeSource, float] = {}
        """The time of each source's last change."""
        self._recent = {source: deque[float](maxlen=most_per_hour) for source in PRIORITY}
        """The times of each policy's changes."""
        self._waits = dict.fromkeys(PRIORITY, 0.0)
        """Seconds that each policy waits after changes by any other; 0 without conflicts."""
        self._conflicts = dict.fromkeys(PRIORITY, -math.inf)
        """The time of each policy's last conflict."""
        self._refused: dict[ChangeSource, tuple[float, float]] = {}
        """The first and the last refusal since the policy's last change."""

    def may_change(self, source: ChangeSource, now: float) -> str:
        """Empty if ``source`` may change the topology now, else the reason, as a clause for the status."""
        if source is ChangeSource.OPERATOR:
            return ""
        reason = self._too_often(source, now)
        if not reason and not self._out_of_patience(source, now):
            reason = self._too_early(source, now)
        if reason:
            first, last = self._refused.get(source, (now, now))
            self._refused[source] = (now if now - last > self._conflict else first), now
        return reason

    def changed(self, source: ChangeSource, now: float) -> None:
        """Record that ``source`` has changed the topology. Called at the end of the change."""
        if source is not ChangeSource.OPERATOR:
            self._note_conflict(source, now)
            self._recent[source].append(now)
            self._refused.pop(source, None)
        self._last[source] = now

    def _too_often(self, source: ChangeSource, now: float) -> str:
        recent = self._recent[source]
        if len(recent) < (recent.maxlen or 0) or now - recent[0] >= 3600:
            return ""
        return f"{source.value} has changed the topology {len(recent)} times within an hour"

    def _out_of_patience(self, source: ChangeSource, now: float) -> bool:
        """Whether the policy has been refused for long enough. It must have gone on asking."""
        first, last = self._refused.get(source, (now, now))
        return now - first >= self._longest and now - last <= self._conflict

    def _too_early(self, source: ChangeSource, now: float) -> str:
        for other, since in self._last.items():
            wait = 0.0 if other is source else self._wait(source, other)
            if now - since < wait:
                return (
                    f"{other.value} changed the topology {now - since:.0f} s ago, and {source.value} waits "
                    f"{wait:.0f} s"
                )
        return ""

    def _wait(self, source: ChangeSource, other: ChangeSource) -> float:
        """Seconds that a policy waits after a change by another source."""
        if other is ChangeSource.OPERATOR:
            return self._settle
        outranked = PRIORITY.index(other) < PRIORITY.index(source)
        return max(self._settle if outranked else 0.0, self._waits[source])

    def _note_conflict(self, source: ChangeSource, now: float) -> None:
        """Double the wait of a policy that acts shortly after another one that acted shortly after it."""
        before = self._last.get(source, -math.inf)
        between = [self._last.get(other, -math.inf) for other in PRIORITY if other is not source]
        between = [time for time in between if time >= before]
        wait = self._waits[source]
        soon = self._conflict + max(wait, self._settle)
        if between and now - max(between) <= soon and min(between) - before <= soon:
            self._waits[source] = min(2 * max(wait, self._settle), self._longest)
            self._conflicts[source] = now
        elif now - self._conflicts[source] > self._calm + wait:
            self._waits[source] = 0.0


def _check(name: str, value: float, rule: str, holds: bool) -> None:
    if not holds:
        raise SettingError("arbiter", f"{name} must be {rule}, not {value!r}", "Leave it out to get the default.")
