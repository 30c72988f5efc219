"""A TCP connection that is begun before anybody needs it: while the SSH library is imported, the network answers.

Side effects: a thread, one connection. Nothing is sent over it; whoever takes it checks the host's key first.
"""

from __future__ import annotations

import socket
import threading

CONNECT_TIMEOUT_S = 8  # three attempts and their pauses stay below 30 s


class Dialed:
    """A connection to `host` and `port`, under way."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket.socket | None = None
        self._failure: OSError | UnicodeError | None = None
        self._thread = threading.Thread(target=self._dial, daemon=True, name="zy-dial")
        self._thread.start()

    def _dial(self) -> None:
        try:
            self._socket = socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S)
        except (OSError, UnicodeError) as error:
            self._failure = error

    def take(self) -> socket.socket | None:
        """Return the connection, None when it has been taken before; raise what kept it from being made."""
        self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        taken, self._socket = self._socket, None
        return taken

    def close(self) -> None:
        """Let go of a connection that nobody took; one that is still under way goes with its thread."""
        if not self._thread.is_alive() and self._socket is not None:
            self._socket.close()
            self._socket = None
