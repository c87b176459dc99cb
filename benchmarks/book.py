"""The lines of the word count from Kafka (A 6.2): a book's, or made ones of the same shape; each is sent with the
time in front: 16 digits, microseconds since 1970, and a tab."""

from __future__ import annotations

import random
import time
from pathlib import Path

_LINES, _VOCABULARY = 2_500, 5_300  # as Alice's Adventures in Wonderland has them, blank lines left out
_WIDTH = 72  # characters a line, at most
_DIGITS = 16


def book(path: str | None = None) -> list[str]:
    """The text's lines without blank ones, one space between words; made ones without a path."""
    if path is None:
        return made_lines()
    lines = (" ".join(line.split()) for line in Path(path).read_text("utf-8").splitlines())
    return [line for line in lines if line]


def made_lines(seed: int = 1) -> list[str]:
    """Lines about as long as a novel's, of words about as long and as often repeated (Zipf's law)."""
    rng = random.Random(seed)
    words = list(dict.fromkeys(_word(rng, place) for place in range(2 * _VOCABULARY)))[:_VOCABULARY]
    total, weights = 0.0, []
    for place in range(len(words)):
        total += 1 / (place + 2)
        weights.append(total)
    lines = []
    for _ in range(_LINES):
        width = _WIDTH if rng.random() < 0.6 else rng.randint(15, _WIDTH)  # the rest end a paragraph or are talk
        line = ""
        for word in rng.choices(words, cum_weights=weights, k=_WIDTH):
            if len(line) + 1 + len(word) > width:
                break
            line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def _word(rng: random.Random, place: int) -> str:
    """Frequent words are short."""
    length = rng.randint(1, 4) if place < 100 else rng.randint(3, 9)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))


def micros() -> int:
    """The wall clock, as the lines carry it."""
    return time.time_ns() // 1000


def stamped(line: str, sent: int) -> str:
    return f"{sent:0{_DIGITS}d}\t{line}"


def sent_at(stamped_line: str) -> int:
    """When the line was sent, microseconds since 1970."""
    return int(stamped_line[:_DIGITS])


def words_of(stamped_line: str) -> list[str]:
    return stamped_line[_DIGITS + 1 :].split(" ")


TEXT_BEGINS = _DIGITS + 1
"""Where the words of a stamped line begin; what is before it but for the tab is the time."""
