"""An SSH connection that is begun before anybody needs it: while the rest is imported, the network answers.

Nothing but a key exchange is sent over it; whoever takes it checks the host's key first. Side effects: a thread, one
connection.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from controller.addresses import CONNECT_TIMEOUT_S

if TYPE_CHECKING:
    from controller.link import Begun


class Dialed:
    """A connection to `host` and `port` under way; `known_hosts` tells which kind of key to ask for."""

    def __init__(self, host: str, port: int, known_hosts: str) -> None:
        self.address = (host, port)
        self._known_hosts = known_hosts
        self._begun: Begun | None = None
        self._failure: OSError | UnicodeError | None = None
        self._is_unwanted = False
        self._thread = threading.Thread(target=self._dial, daemon=True, name="zy-dial")
        self._thread.start()

    def _dial(self) -> None:
        try:
            sock = socket.create_connection(self.address, timeout=CONNECT_TIMEOUT_S)
        except (OSError, UnicodeError) as error:
            self._failure = error
            return
        from controller.link import begin_exchange  # a tenth of a second, in which the network answers

        with suppress(Exception):  # pins that cannot be read, a link that broke: who opens the box meets it and says so
            self._begun = begin_exchange(sock, *self.address, self._known_hosts)
        if self._begun is None:
            sock.close()
        if self._is_unwanted:
            self._let_go()

    def take(self) -> Begun | None:
        """Return the connection, None when there is none any more; raise what kept it from being made."""
        self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        taken, self._begun = self._begun, None
        return taken

    def close(self) -> None:
        """Let go of a connection that nobody took; one that is still under way is closed when it stands."""
        self._is_unwanted = True
        self._let_go()

    def _let_go(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.transport.close()
