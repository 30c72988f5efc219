"""The box: asked one thing at a time, over SSH or on this machine (`local_box.py`). The only place that speaks SSH.

Side effects: network and processes. Nothing is stored on the box by asking; values travel by stdin, never in a
command line. Host keys are pinned (`host_keys.py`), keys stay in memory (`private_keys.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import paramiko

from controller import exchange
from controller.addresses import CONNECT_TIMEOUT_S
from controller.dial import Dialed
from controller.host_keys import parse_pins
from controller.link import Hop, Link, Login, Patience, WorthAnotherTry, open_link, reason_of
from controller.local_box import LocalBox as LocalBox
from controller.release import agent_bundle
from corpus_builder.errors import ProjectError
from corpus_builder.say import spoken

if TYPE_CHECKING:
    from controller.settings import Ssh

log = logging.getLogger(__name__)

PATIENT = Patience()
RETRY_AFTER_S = (1.0, 3.0)  # a machine that boots, a full MaxStartups; never a wrong key
COMMAND = f"exec python3 -IS -c '{exchange.LOADER}'"


class Box(Protocol):
    """Something that answers the operations of `controller.boxside`."""

    name: str

    def ask(
        self, op: str, args: Mapping[str, Any], *, timeout_s: float, stream: Iterable[bytes] | None = None
    ) -> dict[str, Any]:
        """Return the answer to `op`; raise the box's ProjectError, or why there is no answer."""

    def close(self) -> None:
        """Let go of the box; asking again reconnects."""


class SshBox:
    """A machine reached over SSH; connects at the first question, and again when the link has gone since.

    Args:
        ssh: How to reach it; key and pins are read at once, before any network.
        sleep: Waits between two attempts to connect; `bundle` is the agent; `patience`, how long silence may last;
            `dialed`, a connection to the first hop that is under way.

    Raises:
        ProjectError: `key_invalid`, `known_hosts_invalid`.
    """

    def __init__(
        self,
        ssh: Ssh,
        *,
        sleep: Callable[[float], None] = time.sleep,
        bundle: Callable[[], bytes] = agent_bundle,
        patience: Patience = PATIENT,
        dialed: Dialed | None = None,
    ) -> None:
        self.name = ssh.name
        self._patience = patience
        self._dialed = dialed
        self._bundle = bundle
        self._sleep = sleep
        self._login = Login.of(ssh)
        self._hops = [Hop(user, parse_pins(ssh.known_hosts, host=host, port=port)) for user, host, port in ssh.route()]
        self.problems = self._hops[-1].pinned.problems
        self._links: list[Link] = []
        for problem in self.problems:
            log.warning("ZY_GPU_KNOWN_HOSTS, %s", spoken(problem, "en"))

    def ask(
        self, op: str, args: Mapping[str, Any], *, timeout_s: float, stream: Iterable[bytes] | None = None
    ) -> dict[str, Any]:
        """Return the answer of the agent's operation `op`."""
        request = exchange.make_request(op, args, self._bundle())
        wire = self._start()
        talk = exchange.converse(wire, request, stream, timeout_s=timeout_s)
        if talk.is_timed_out:
            self._drop_links()  # whatever hangs there, the next question gets a new link
        return exchange.read_answer(talk, request, host=self.name)

    def close(self) -> None:
        """End the connection, the last hop first."""
        self._drop_links()
        if self._dialed is not None:
            self._dialed.close()

    def _drop_links(self) -> None:
        while self._links:
            self._links.pop().close()

    def __enter__(self) -> SshBox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> _ChannelWire:
        """Start the loader on a connection that lives; a link that died unnoticed is replaced once."""
        for is_last_try in (False, True):
            try:
                channel = self._transport().open_session(timeout=CONNECT_TIMEOUT_S)
                channel.exec_command(COMMAND)
                return _ChannelWire(channel)
            except (paramiko.SSHException, OSError, EOFError) as error:
                self._drop_links()
                if is_last_try:
                    raise ProjectError("connection_lost", host=self.name, reason=reason_of(error)) from error
        raise AssertionError("unreachable")

    def _transport(self) -> paramiko.Transport:
        transport = self._links[-1].transport if self._links else None
        if transport is not None and transport.is_active():
            return transport
        self._drop_links()
        for delay_s in (*RETRY_AFTER_S, None):
            try:
                return self._connect()
            except WorthAnotherTry as error:
                self._drop_links()
                if delay_s is None:
                    raise ProjectError("box_unreachable", host=error.host, reason=str(error)) from error.__cause__
                log.info("%s does not answer (%s), trying again in %.0f s", error.host, error, delay_s)
                self._sleep(delay_s)
            except BaseException:
                self._drop_links()
                raise
        raise AssertionError("unreachable")

    def _connect(self) -> paramiko.Transport:
        """Connect hop by hop, each with its own pinned key."""
        for hop in self._hops:
            through = self._links[-1] if self._links else None
            begun_early = self._dialed.take if self._dialed is not None and through is None else None
            self._links.append(open_link(hop, self._login, through, self._patience, begun_early=begun_early))
        return self._links[-1].transport


@contextmanager
def _as_network_errors() -> Iterator[None]:
    """A link that breaks while paramiko sends is an EOFError or an SSHException, by where it was."""
    try:
        yield
    except (EOFError, paramiko.SSHException) as error:
        raise ConnectionError(reason_of(error)) from error


class _ChannelWire:
    """The loader at the other end of an SSH channel."""

    EXIT_WAIT_S = 10

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def write(self, data: bytes) -> None:
        with _as_network_errors():
            self._channel.sendall(data)

    def end_write(self) -> None:
        with _as_network_errors():
            self._channel.shutdown_write()

    def read(self, size: int) -> bytes:
        return self._channel.recv(size)

    def read_error(self, size: int) -> bytes:
        return self._channel.recv_stderr(size)

    def exit_code(self) -> int | None:
        """Return the exit code, None when none was sent: the link is gone, or a signal ended the process."""
        self._channel.status_event.wait(self.EXIT_WAIT_S)
        return self._channel.exit_status if self._channel.exit_status >= 0 else None

    def close(self) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()
