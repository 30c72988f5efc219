"""This machine as the box: the agent as a child process instead of over SSH. Side effects: a process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from controller import exchange
from controller.release import agent_bundle
from corpus_builder.errors import ProjectError


class LocalBox:
    """This machine as the box: the same agent, started as a child process instead of over SSH."""

    name = "local"

    def __init__(
        self, python: str = sys.executable or "python3", *, bundle: Callable[[], bytes] = agent_bundle
    ) -> None:
        self._python = python
        self._bundle = bundle

    def ask(
        self, op: str, args: Mapping[str, Any], *, timeout_s: float, stream: Iterable[bytes] | None = None
    ) -> dict[str, Any]:
        """Return the answer of the agent's operation `op`."""
        request = exchange.make_request(op, args, self._bundle())
        try:
            wire = ProcessWire([self._python, *exchange.PYTHON_OPTIONS, exchange.LOADER])
        except OSError as error:
            raise ProjectError("box_no_python", host=self.name, reason=type(error).__name__) from error
        return exchange.read_answer(
            exchange.converse(wire, request, stream, timeout_s=timeout_s), request, host=self.name
        )

    def close(self) -> None:
        """Nothing is held between two questions."""

    def __enter__(self) -> LocalBox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProcessWire:
    """The loader as a child process. Sockets instead of pipes, because `shutdown` wakes whoever reads them."""

    EXIT_WAIT_S = 2
    #: What the runner was told is none of the box's business, also when both are the same machine.
    NOT_FOR_THE_BOX = re.compile(r"(ZY|AWS|GITHUB|ACTIONS|RUNNER|INPUT)_")

    def __init__(self, argv: Sequence[str]) -> None:
        self._talk, talk = socket.socketpair()
        self._errors, errors = socket.socketpair()
        environment = {name: text for name, text in os.environ.items() if not self.NOT_FOR_THE_BOX.match(name)}
        try:
            self._process = subprocess.Popen(
                argv, stdin=talk.fileno(), stdout=talk.fileno(), stderr=errors.fileno(), env=environment
            )
        except OSError:
            self._talk.close()
            self._errors.close()
            raise
        finally:
            talk.close()
            errors.close()

    def write(self, data: bytes) -> None:
        self._talk.sendall(data)

    def end_write(self) -> None:
        self._talk.shutdown(socket.SHUT_WR)

    def read(self, size: int) -> bytes:
        return _received(self._talk, size)

    def read_error(self, size: int) -> bytes:
        return _received(self._errors, size)

    def exit_code(self) -> int | None:
        """Return the exit code, None when a signal ended the process."""
        with suppress(subprocess.TimeoutExpired):
            return code if (code := self._process.wait(self.EXIT_WAIT_S)) >= 0 else None
        return None

    def close(self) -> None:
        for sock in (self._talk, self._errors):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(self.EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._talk.close()
        self._errors.close()


def _received(sock: socket.socket, size: int) -> bytes:
    try:
        return sock.recv(size)
    except OSError:
        return b""
