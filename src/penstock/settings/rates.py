"""Rates by name in the text of one setting."""

from __future__ import annotations

import math


def parse_rates(text: str) -> dict[str, float]:
    """``"a=1e6, b>c=2e5"`` → rates by name. Raises ``ValueError``, whose text says what is wrong."""
    rates: dict[str, float] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = (each.strip() for each in part.rpartition("="))
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not equals or not name or not 0 < rate < math.inf:
            raise ValueError(f"{part!r} is not of the form NAME=RATE with a rate above 0")
        if name in rates:
            raise ValueError(f"{name!r} has two rates")
        rates[name] = rate
    return rates
