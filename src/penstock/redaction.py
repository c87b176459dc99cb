"""Removes passwords and control characters from text before it leaves the process.

``redacted`` hides secrets. It is applied to every part of a ``PenstockError``, to every log record and to every
text that workers and processors report. It hides whatever looks like a secret (a password in a URL, the value
after ``password=``), and every value passed to ``hide``.

``printable`` makes text safe for a terminal. It is applied where text is displayed.
"""

from __future__ import annotations

import json
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
"""Characters. A shorter secret is only hidden where it looks like one, because it would also occur in ordinary
words."""

_SHORTEST_LINE = 6
"""Characters. The same for each line of a secret with several lines: short lines are words or ends of Base64."""

# Repetitions are bounded or do not overlap, so any text is searched in linear time.
_CERTAIN = (
    r"passw(?:or)?d|passphrase|pwd|secret|credential|api[_.\-]?key|access[_.\-]?key|account[_.\-]?key"
    r"|private[_.\-]?key|encryption[_.\-]?key|deployment[_.\-]?key"
)
_NAME = rf"(?:{_CERTAIN}|token|authorization|key[_.\-]pem|amz[_.\-]signature)[\w.\-]{{0,64}}"
# Before a colon, only names without a suffix (tokenizer.py:3), and not the token in a parser's error message.
_TOKEN = r"token(?:(?<!\w\stoken)|(?<=api\stoken)|(?<=auth\stoken)|(?<=access\stoken)|(?<=session\stoken))"
_LABEL = rf"(?:{_CERTAIN}|{_TOKEN}|ssl[_.\-]key[_.\-]pem)s?(?:[_.\-](?:key|value|hash|pem))?"

_CLOSING = r"['\"](?:[\s,;.)\]}]|$)"
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_QUOTED_INSIDE = (
    r"\\{1,4}['\"](?:(?!\\{1,4}['\"])[^\r\n])*(?:\\{1,4}['\"])?"  # JSON in a text that is itself quoted
)
_UNCLOSED = rf"(?!{_CLOSING})['\"][^\r\n]*"  # a truncated text: to the end of the line
_BARE = rf"(?!\*\*\*)(?:(?!{_CLOSING})\S)+"  # to the next space or closing quotation mark
_VALUE = rf"(?:{_QUOTED}|{_QUOTED_INSIDE}|{_UNCLOSED}|{_BARE})"
_IN_QUERY = rf"(?:(?!{_CLOSING})[^&#\s])+"

# The password in a URL ends at the last @ before a space or a quotation mark, because people forget to encode @
# and /. If there is none, it ends at the last @ before a space, otherwise at the next @ in the line. A port number
# followed by a path is not a password.
_PORT = r"(?:\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
_USER = rf"(\b[a-z][a-z0-9+.\-]{{0,30}}://[^\s:/@'\"?#\[]{{0,256}}):(?!{_PORT}(?:[/?#,;\s'\")]|$))"
_IN_URL = re.compile(rf"{_USER}[^\s'\"]{{0,1024}}@", re.I)
_IN_URL_QUOTED = re.compile(rf"{_USER}(?!\*\*\*@)(?!{_PORT}\W)\S{{0,1024}}@", re.I)
_IN_URL_SPACED = re.compile(
    rf"{_USER}(?!\*\*\*@)(?!{_PORT}\W)(?:(?!://)[^@\r\n]){{0,256}}@(?:[^\s'\"@]{{0,256}}@){{0,16}}", re.I
)
_IN_PARAMETERS = re.compile(
    rf"([?&](?:[\w.\-]{{0,64}}?(?:{_NAME}|signature)|key|sig|auth)=)(?!\*\*\*){_IN_QUERY}", re.I
)
_ASSIGNED = re.compile(rf"({_NAME}\s{{0,8}}(?:=>|:=|=(?!>))\s{{0,8}}){_VALUE}", re.I)
_LABELLED = re.compile(rf"({_LABEL}:(?!//)[ \t]{{0,8}}){_VALUE}", re.I)
_MAPPED = re.compile(
    rf"({_NAME}\\{{0,4}}['\"]\s{{0,8}}:\s{{0,8}}b?)"
    rf"(?:{_QUOTED}|{_QUOTED_INSIDE}|{_UNCLOSED}|(?!\*\*\*)[^\s,}}]+)",
    re.I,
)
_PAIRED = re.compile(
    rf"([(\[]\s{{0,8}}b?['\"][\w.\-]{{0,64}}?{_NAME}['\"]\s{{0,8}},\s{{0,8}}b?)(?:{_QUOTED})(?=\s{{0,8}}[)\]])",
    re.I,
)
_SIGNATURE = re.compile(r"(signature=)[\w+/%=\-]{16,}", re.I)
_HEADER = re.compile(
    r"(\bauthorization:\s{0,8}(?:[\w\-]{1,32}\s{1,8})?)(?!(?:[\w\-]{1,32}\s{1,8})?\*\*\*)\S+", re.I
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,8}-----)(?:(?!-----)[\s\S])+")
_SUSPICIOUS = re.compile(
    r"://|passw|passphrase|pwd|secret|token|credential|authorization|key|signature|[?&](?:sig|auth)", re.I
)
_SHOWN_AS = (
    (_PRIVATE_KEY, rf"\1{HIDDEN}"),
    (_IN_URL, rf"\1:{HIDDEN}@"),
    (_IN_URL_QUOTED, rf"\1:{HIDDEN}@"),
    (_IN_URL_SPACED, rf"\1:{HIDDEN}@"),
    (_IN_PARAMETERS, rf"\1{HIDDEN}"),
    (_MAPPED, rf"\1{HIDDEN}"),
    (_PAIRED, rf"\1{HIDDEN}"),
    (_ASSIGNED, rf"\1{HIDDEN}"),
    (_LABELLED, rf"\1{HIDDEN}"),
    (_SIGNATURE, rf"\1{HIDDEN}"),
    (_HEADER, rf"\1{HIDDEN}"),
)

_lock = threading.Lock()
_hidden: tuple[str, ...] = ()


def redacted(text: str) -> str:
    """``text`` with ``***`` instead of every secret. Idempotent."""
    for secret in _hidden:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    if _SUSPICIOUS.search(text) is None:
        return text
    for pattern, shown in _SHOWN_AS:
        text = pattern.sub(shown, text)
    return text


def hide(secret: str) -> None:
    """Make ``redacted`` hide this value from now on, in this process: verbatim, encoded for a URL, as written by
    ``repr`` and JSON, and each of its lines."""
    global _hidden
    forms = _forms(secret)
    if len(lines := secret.splitlines()) > 1:
        for line in lines:
            if len(line.strip()) >= _SHORTEST_LINE:
                forms |= _forms(line.strip())
    with _lock:
        # The longest first, because one secret may be the beginning of another.
        _hidden = tuple(sorted({*_hidden, *forms}, key=len, reverse=True))


def _forms(secret: str) -> set[str]:
    """The forms in which a secret may occur in a text."""
    try:
        encoded = secret.encode(errors="surrogateescape")  # an environment variable may contain any bytes
    except UnicodeEncodeError:
        encoded = secret.encode(errors="surrogatepass")
    forms = {secret, quote(encoded, safe=""), quote_plus(encoded)}
    if len(secret) >= _SHORTEST:
        # Preceded by both kinds of quotation marks, because repr then escapes the single one, as it does inside a
        # longer text.
        forms |= {repr(secret)[1:-1], ascii(secret)[1:-1], repr("'\"" + secret)[4:-1], ascii("'\"" + secret)[4:-1]}
        forms |= {repr(encoded)[2:-1], repr(b"'\"" + encoded)[5:-1]}
        forms |= {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    return {form for form in forms if len(form) >= _SHORTEST}


def described(error: BaseException) -> str:
    """``Type: text`` of an exception, redacted."""
    return redacted(f"{type(error).__name__}: {error}")


# ---- terminals -----------------------------------------------------------------------------------------

_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)  # C0, DEL, C1; characters that change the text direction or end a line; surrogates, which cannot be printed


def printable(text: str, multiline: bool = False) -> str:
    r"""``text`` without characters that a terminal interprets: control characters are written as ``\x1b``. Line
    ends and tabs become spaces, or are kept with ``multiline``."""

    def shown(found: re.Match[str]) -> str:
        character = found[0]
        if character in "\n\t":
            return character if multiline else " "
        return character.encode("unicode_escape").decode("ascii")

    return _CONTROL.sub(shown, text)


def printable_values(value: Any) -> Any:
    """A JSON value with every text in it ``printable``. Line ends and tabs are kept."""
    if isinstance(value, str):
        return printable(value, multiline=True)
    if isinstance(value, dict):
        return {printable_values(key): printable_values(item) for key, item in value.items()}
    return [printable_values(item) for item in value] if isinstance(value, list) else value


# ---- logs ----------------------------------------------------------------------------------------------


class _RedactingHandler(logging.Handler):
    """The first handler of the logger ``penstock``. It writes nothing: it redacts each record and its traceback
    before other handlers see it, wherever the user has added them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.msg, record.args = redacted(record.getMessage()), None
        except (TypeError, ValueError):
            self.handleError(record)  # the arguments do not fit the message
        if record.exc_info and not record.exc_text:
            record.exc_text = redacted(_formatter.formatException(record.exc_info))
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not self._written_elsewhere(record.name):
            record.msg = printable(str(record.msg), multiline=True)
            record.exc_text = record.exc_text and printable(record.exc_text, multiline=True)
            last.handle(record)  # what the logging module does for a logger without handlers

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
    """Redact all records of Penstock's loggers. Called when the package is imported; a second call does
    nothing."""
    logging.getLogger("penstock").addHandler(_redacting)


def redact_tracebacks() -> None:
    """Redact the tracebacks of uncaught exceptions. For processes that belong to Penstock."""
    sys.excepthook = _print_redacted
    threading.excepthook = lambda failed: _print_redacted(failed.exc_type, failed.exc_value, failed.exc_traceback)


def _print_redacted(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
    if sys.stderr is not None and not issubclass(kind, SystemExit):
        text = redacted("".join(traceback.format_exception(kind, error, where)))
        print(printable(text, multiline=True), end="", file=sys.stderr)
