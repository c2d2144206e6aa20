"""How the parent and its worker talk: JSON objects with a length in front, over a socket pair that nothing else writes to."""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")

Message = dict[str, Any]


class Channel:
    """One end of the conversation."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """Raises ``OSError`` if the other end is gone, ``TypeError`` or ``ValueError`` if JSON has no words for ``message``."""
        data = json.dumps(message, allow_nan=False).encode()
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, or ``None`` after ``timeout`` seconds (``None``: wait for ever). Raises ``EOFError`` at the end."""
        while (message := self._complete()) is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                return None
            try:
                data = self._connection.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError("the other end closed the connection")
            self._received += data
        return message

    def close(self) -> None:
        self._connection.close()

    def _complete(self) -> Message | None:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message: Message = json.loads(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message
