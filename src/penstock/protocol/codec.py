"""Messages as bytes: MessagePack, by ``msgspec``. Decoding checks every field's type, and can make nothing but the
messages of the protocol: bytes from a socket cannot run code."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.errors import ControlRefused
from penstock.protocol.commands import Command
from penstock.protocol.events import Event
from penstock.protocol.requests import OperatorAnswer, OperatorRequest

Message = Command | Event | OperatorRequest | OperatorAnswer

_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # a value of the user's that MessagePack does not know: its text
_to_driver: msgspec.msgpack.Decoder[Event | OperatorRequest] = msgspec.msgpack.Decoder(Event | OperatorRequest)
_to_worker: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_to_operator = msgspec.msgpack.Decoder(OperatorAnswer)

T = TypeVar("T")


def encode(message: Message) -> bytes:
    """Raises ``ControlRefused`` where a value of the user's inside the message cannot be written."""
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ControlRefused("control connection", f"{type(message).__name__} cannot be sent: {error}") from error


def decode_event(data: bytes) -> Event | OperatorRequest:
    """What a worker or an operator says. Raises ``ControlRefused`` for anything else."""
    return _decode(_to_driver, data)


def decode_command(data: bytes) -> Command:
    """What the driver says to a worker. Raises ``ControlRefused`` for anything else."""
    return _decode(_to_worker, data)


def decode_answer(data: bytes) -> OperatorAnswer:
    """What the driver answers an operator. Raises ``ControlRefused`` for anything else."""
    return _decode(_to_operator, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ControlRefused("control connection", f"a message does not follow the protocol: {error}") from error
