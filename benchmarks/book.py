"""Lines for the word count from Kafka (*Lu 2020*, section 6.2): from a book, or generated with the same
statistics. Each is sent with a time stamp in front: 16 digits, microseconds since 1970, and a tab."""

from __future__ import annotations

import random
import time
from pathlib import Path

_LINES, _VOCABULARY = 2_500, 5_300  # of Alice's Adventures in Wonderland, without blank lines
_WIDTH = 72  # characters per line, at most
_DIGITS = 16


def book(path: str | None = None) -> list[str]:
    """The non-blank lines of a text, with single spaces between words; generated lines if there is no path."""
    if path is None:
        return made_lines()
    lines = (" ".join(line.split()) for line in Path(path).read_text("utf-8").splitlines())
    return [line for line in lines if line]


def made_lines(seed: int = 1) -> list[str]:
    """Lines as long as in a novel, with word lengths and frequencies (Zipf's law) like a novel's."""
    rng = random.Random(seed)
    words = list(dict.fromkeys(_word(rng, place) for place in range(2 * _VOCABULARY)))[:_VOCABULARY]
    total, weights = 0.0, []
    for place in range(len(words)):
        total += 1 / (place + 2)
        weights.append(total)
    lines = []
    for _ in range(_LINES):
        width = _WIDTH if rng.random() < 0.6 else rng.randint(15, _WIDTH)  # others end a paragraph or are dialogue
        line = ""
        for word in rng.choices(words, cum_weights=weights, k=_WIDTH):
            if len(line) + 1 + len(word) > width:
                break
            line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def _word(rng: random.Random, place: int) -> str:
    """A random word. Frequent words are short."""
    length = rng.randint(1, 4) if place < 100 else rng.randint(3, 9)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))


def micros() -> int:
    """The wall clock in microseconds, as in the lines."""
    return time.time_ns() // 1000


def stamped(line: str, sent: int) -> str:
    return f"{sent:0{_DIGITS}d}\t{line}"


def sent_at(stamped_line: str) -> int:
    """When the line was sent, in microseconds since 1970."""
    return int(stamped_line[:_DIGITS])


def words_of(stamped_line: str) -> list[str]:
    return stamped_line[_DIGITS + 1 :].split(" ")


TEXT_BEGINS = _DIGITS + 1
"""Position of the words in a line; before it are the time stamp and a tab."""
