"""Encodes messages as MessagePack with ``msgspec``. Decoding checks the type of every field and creates only
messages of the protocol, so bytes from a socket cannot run code."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.errors import ControlRefused
from penstock.protocol.commands import Command
from penstock.protocol.events import Event
from penstock.protocol.requests import OperatorAnswer, OperatorRequest
from penstock.texts import bounded_cell

Message = Command | Event | OperatorRequest | OperatorAnswer

# Values of users' types that MessagePack does not know become text.
_encoder = msgspec.msgpack.Encoder(enc_hook=bounded_cell)
_to_driver: msgspec.msgpack.Decoder[Event | OperatorRequest] = msgspec.msgpack.Decoder(Event | OperatorRequest)
_to_worker: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_to_operator = msgspec.msgpack.Decoder(OperatorAnswer)

T = TypeVar("T")


def encode(message: Message) -> bytes:
    """Encode a message. Raises ``ControlRefused`` if it contains a user's value that cannot be encoded."""
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ControlRefused("control connection", f"{type(message).__name__} cannot be sent: {error}") from error


def decode_event(data: bytes) -> Event | OperatorRequest:
    """Decode a message of a worker or operator. Raises ``ControlRefused`` if it is not valid."""
    return _decode(_to_driver, data)


def decode_command(data: bytes) -> Command:
    """Decode a message of the driver to a worker. Raises ``ControlRefused`` if it is not valid."""
    return _decode(_to_worker, data)


def decode_answer(data: bytes) -> OperatorAnswer:
    """Decode the driver's answer to an operator. Raises ``ControlRefused`` if it is not valid."""
    return _decode(_to_operator, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ControlRefused("control connection", f"a message does not follow the protocol: {error}") from error
