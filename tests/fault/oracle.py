"""What a topology that was under fire should have written, compared with what it wrote."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

KEYS = 50
ORIGINS = (0, 1)
Row = tuple[int, int, str, int]
"""⟨origin, n, key, seen⟩: record n of an origin, its key, and how many of the key there had been with it."""


def key_of(n: int) -> str:
    return f"key-{n % KEYS}"


def totals(count: int) -> Counter[str]:
    """How often each key comes in ``count`` records of each origin."""
    return Counter(key_of(n) for n in range(count) for _ in ORIGINS)


@dataclass
class Verdict:
    """How many records are missing, how many rows or counts are not as they should be, and how many rows are there
    more than once, which at least once allows."""

    rows: int = 0
    lost: int = 0
    wrong: int = 0
    doubled: int = 0
    notes: list[str] = field(default_factory=list)
    """What is wrong, with examples."""

    @property
    def good(self) -> bool:
        return not (self.lost or self.wrong)

    def blame(self, found: list[str], what: str) -> None:
        """Rows or counts that are wrong."""
        if found:
            self.wrong += len(found)
            self._note(found, what)

    def miss(self, found: list[str]) -> None:
        if found:
            self.lost += len(found)
            self._note(found, "records are not in the output")

    def _note(self, found: list[str], what: str) -> None:
        self.notes.append(f"{len(found)} {what}, such as {', '.join(found[:3])}")


def judge(exact: bool, count: int, rows: Iterable[Row], counts: Mapping[str, int]) -> Verdict:
    """``rows``: all that the sink holds; ``counts``: those of the last committed state. Records 0 to ``count`` - 1
    of each origin went in.

    Exactly once: each record is there once, the values of ``seen`` of each key are 1, 2, 3 and so on, and the
    counts are exact. At least once: each record is there, nothing is there that did not go in, and no count is too
    low.
    """
    rows = list(rows)
    verdict = Verdict(rows=len(rows))
    times = Counter((origin, n) for origin, n, _, _ in rows)
    wanted = {(origin, n) for origin in ORIGINS for n in range(count)}
    verdict.miss(sorted(map(str, wanted - times.keys())))
    verdict.blame(sorted(map(str, times.keys() - wanted)), "records never went in")
    verdict.blame([str(row) for row in rows if row[2] != key_of(row[1]) or row[3] < 1], "rows have wrong values")
    again = sorted(f"{record} {each} times" for record, each in times.items() if each > 1)
    verdict.doubled = sum(times.values()) - len(times)
    oracle = totals(count)
    if not exact:
        low = [
            f"{key} {counts.get(key, 0)} of {all_}" for key, all_ in oracle.items() if counts.get(key, 0) < all_
        ]
        verdict.blame(low, "counts are too low")
        return verdict
    verdict.blame(again, "records are there more than once")
    verdict.blame(
        [f"{key} {counts.get(key)} instead of {all_}" for key, all_ in oracle.items() if counts.get(key) != all_],
        "counts are wrong",
    )
    seen: defaultdict[str, list[int]] = defaultdict(list)
    for _, _, key, number in rows:
        seen[key].append(number)
    gaps = [key for key in oracle if sorted(seen[key]) != list(range(1, len(seen[key]) + 1))]
    verdict.blame(gaps, "keys have counts in the output that do not follow each other")
    return verdict


def judge_savepoint(positions: Mapping[str, int], counts: Mapping[str, int]) -> str:
    """Exactly once a savepoint holds one moment: as many records are counted as the spouts have emitted. Returns
    what is wrong, or nothing."""
    emitted, counted = sum(positions.values()), sum(counts.values())
    return "" if emitted == counted else f"{emitted} records emitted and {counted} counted"
