"""What text may leave a process: without passwords, and without control characters.

``redacted`` hides secrets. It is applied to every part of a ``PenstockError``, to every log record and
to every text that workers and processors report. It hides what looks like a secret (a password in a URL, the value
after ``password=``), and every value that ``hide`` was told.

``printable`` makes text harmless to a terminal. It is applied where text is displayed.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"
_SHORTEST = 4
"""Characters. A shorter secret is hidden only where it looks like one: it would be found in ordinary words."""

# Repetitions have limits, or do not overlap: a text of any content is searched in linear time.
_NAME = (
    r"(?:passw(?:or)?d|passphrase|pwd|secret|token|credential|authorization|api[_.\-]?key|access[_.\-]?key"
    r"|account[_.\-]?key|private[_.\-]?key|encryption[_.\-]?key|deployment[_.\-]?key)[\w.\-]{0,64}"
)
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_IN_QUERY = r"[^&#\s'\"]+"
_BARE = r"(?!\*\*\*)(?:(?!['\"](?:[\s,;.)\]}]|$))\S)+"  # to the next space or closing quotation mark

# The password of a URL ends at the last @ before a space or a quotation mark: people forget to encode @ and /.
# A port number with a path behind it is not a password.
_IN_URL = re.compile(
    r"(\b[a-z][a-z0-9+.\-]{0,30}://[^\s:/@'\"?#]{0,256}):(?!\d{1,5}(?:[/?#,;\s'\")]|$))[^\s'\"]{0,1024}@", re.I
)
_IN_PARAMETERS = re.compile(rf"([?&](?:[\w.\-]{{0,64}}?{_NAME}|key|sig|signature|auth)=)(?:{_IN_QUERY})", re.I)
_ASSIGNED = re.compile(rf"({_NAME}\s{{0,8}}=\s{{0,8}})(?:{_QUOTED}|{_BARE})", re.I)
_MAPPED = re.compile(rf"({_NAME}['\"]\s{{0,8}}:\s{{0,8}}b?)(?:{_QUOTED}|(?!\*\*\*)[^\s,}}]+)", re.I)
_HEADER = re.compile(r"(\bauthorization:\s{0,8}(?:\w{1,32}\s{1,8})?)(?!(?:\w{1,32}\s{1,8})?\*\*\*)\S+", re.I)
_SUSPICIOUS = re.compile(
    r"://|passw|passphrase|pwd|secret|token|credential|authorization|key|[?&](?:sig|auth)", re.I
)

_lock = threading.Lock()
_hidden: tuple[str, ...] = ()


def redacted(text: str) -> str:
    """``text`` with ``***`` in place of every secret. Applying it twice changes nothing."""
    for secret in _hidden:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    if _SUSPICIOUS.search(text) is None:
        return text
    text = _IN_URL.sub(rf"\1:{HIDDEN}@", text)
    text = _IN_PARAMETERS.sub(rf"\1{HIDDEN}", text)
    text = _MAPPED.sub(rf"\1{HIDDEN}", text)
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return _HEADER.sub(rf"\1{HIDDEN}", text)


def hide(secret: str) -> None:
    """``redacted`` hides this value from now on, in this process, also in its URL-encoded forms."""
    global _hidden
    forms = {form for form in (secret, quote(secret, safe=""), quote_plus(secret)) if len(form) >= _SHORTEST}
    with _lock:
        # The longest first: of two secrets one may be the beginning of the other.
        _hidden = tuple(sorted({*_hidden, *forms}, key=len, reverse=True))


def described(error: BaseException) -> str:
    """``Type: text`` of any exception, redacted."""
    return redacted(f"{type(error).__name__}: {error}")


# ---- terminals -----------------------------------------------------------------------------------------

_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)  # C0, DEL, C1; what changes the direction of text or ends a line; surrogates, which cannot be printed


def printable(text: str, multiline: bool = False) -> str:
    """``text`` without anything a terminal acts upon: control characters are written as ``\\x1b``. Line ends and
    tabs become spaces, or stay with ``multiline``."""

    def shown(found: re.Match[str]) -> str:
        character = found[0]
        if character in "\n\t":
            return character if multiline else " "
        return character.encode("unicode_escape").decode("ascii")

    return _CONTROL.sub(shown, text)


def printable_values(value: Any) -> Any:
    """What JSON can hold, with every text in it ``printable``; line ends and tabs stay."""
    if isinstance(value, str):
        return printable(value, multiline=True)
    if isinstance(value, dict):
        return {printable_values(key): printable_values(item) for key, item in value.items()}
    return [printable_values(item) for item in value] if isinstance(value, list) else value


# ---- logs ----------------------------------------------------------------------------------------------


class _RedactingHandler(logging.Handler):
    """The first handler of the logger ``penstock``. It writes nothing: it redacts each record, with its traceback,
    before the handlers that write it see it, wherever the user has added them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.msg, record.args = redacted(record.getMessage()), None
        except (TypeError, ValueError):
            self.handleError(record)  # arguments that do not fit their message
        if record.exc_info and not record.exc_text:
            record.exc_text = redacted(_formatter.formatException(record.exc_info))
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not self._written_elsewhere(record.name):
            record.msg = printable(str(record.msg), multiline=True)
            record.exc_text = record.exc_text and printable(record.exc_text, multiline=True)
            last.handle(record)  # as the logging module does for a logger without handlers

    def _written_elsewhere(self, name: str) -> bool:
        found: logging.Logger | None = logging.getLogger(name)
        while found is not None:
            if any(handler is not self for handler in found.handlers):
                return True
            found = found.parent if found.propagate else None
        return False


_formatter = logging.Formatter()
_redacting = _RedactingHandler()


def redact_logs() -> None:
    """Redact what Penstock's loggers are given. Called when the package is imported; a second call does
    nothing."""
    logging.getLogger("penstock").addHandler(_redacting)


def redact_tracebacks() -> None:
    """Redact the tracebacks of exceptions that nothing catches. For processes that are Penstock's own."""
    sys.excepthook = _print_redacted
    threading.excepthook = lambda failed: _print_redacted(failed.exc_type, failed.exc_value, failed.exc_traceback)


def _print_redacted(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
    if sys.stderr is not None and not issubclass(kind, SystemExit):
        text = redacted("".join(traceback.format_exception(kind, error, where)))
        print(printable(text, multiline=True), end="", file=sys.stderr)
