"""The box: asked one thing at a time, over SSH or on this machine (`local_box.py`). The only place that speaks SSH.

Side effects: network and processes. Nothing is stored on the box by asking; values travel by stdin, never in a
command line. Host keys are pinned (`host_keys.py`), keys stay in memory (`private_keys.py`).
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import fabric
import paramiko

from controller import exchange
from controller.host_keys import PinnedKeys, PinPolicy, parse_pins
from controller.local_box import LocalBox as LocalBox
from controller.private_keys import load_private_key
from controller.release import agent_bundle
from controller.settings import Ssh
from corpus_builder.errors import ProjectError
from corpus_builder.say import spoken

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10
BANNER_TIMEOUT_S = 15
AUTH_TIMEOUT_S = 20
KEEPALIVE_S = 10
DEAD_LINK_MS = 30_000
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
        sleep: Waits between two attempts to connect; `bundle` is the agent.

    Raises:
        ProjectError: `key_invalid`, `known_hosts_invalid`.
    """

    def __init__(
        self,
        ssh: Ssh,
        *,
        sleep: Callable[[float], None] = time.sleep,
        bundle: Callable[[], bytes] = agent_bundle,
    ) -> None:
        self.name = ssh.name
        self._bundle = bundle
        self._sleep = sleep
        self._login = Login.of(ssh)
        self._hops = [Hop(user, parse_pins(ssh.known_hosts, host=host, port=port)) for user, host, port in ssh.route()]
        self.problems = self._hops[-1].pinned.problems
        self._connections: list[fabric.Connection] = []
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # its tracebacks would stand beside our three lines
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
            self.close()  # whatever hangs there, the next question gets a new link
        return exchange.read_answer(talk, request, host=self.name)

    def close(self) -> None:
        """End the connection, the last hop first."""
        while self._connections:
            self._connections.pop().client.close()

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
                self.close()
                if is_last_try:
                    raise ProjectError("connection_lost", host=self.name, reason=_words(error)) from error
        raise AssertionError("unreachable")

    def _transport(self) -> paramiko.Transport:
        transport: paramiko.Transport | None = self._connections[-1].transport if self._connections else None
        if transport is not None and transport.is_active():
            return transport
        self.close()
        for delay_s in (*RETRY_AFTER_S, None):
            try:
                return self._connect()
            except WorthAnotherTry as error:
                self.close()
                if delay_s is None:
                    raise ProjectError("box_unreachable", host=error.host, reason=str(error)) from error.__cause__
                log.info("%s does not answer (%s), trying again in %.0f s", error.host, error, delay_s)
                self._sleep(delay_s)
            except BaseException:
                self.close()
                raise
        raise AssertionError("unreachable")

    def _connect(self) -> paramiko.Transport:
        """Connect hop by hop, each with its own pinned key."""
        for hop in self._hops:
            gateway = self._connections[-1] if self._connections else None
            self._connections.append(_open(hop, self._login, gateway))
        transport: paramiko.Transport = self._connections[-1].transport
        return transport


@dataclass(frozen=True, slots=True)
class Login:
    """What proves who we are; in memory only."""

    key: paramiko.PKey | None = field(repr=False)
    password: str | None = field(repr=False)

    @classmethod
    def of(cls, ssh: Ssh) -> Login:
        """Return the login of a setting; raise `key_invalid`."""
        return cls(load_private_key(ssh.key, ssh.passphrase) if ssh.key else None, ssh.password)


@dataclass(frozen=True, slots=True)
class Hop:
    """One machine on the way, and the keys that it may show."""

    user: str
    pinned: PinnedKeys

    @property
    def name(self) -> str:
        """`host:port`, as messages say it."""
        return f"{self.pinned.host}:{self.pinned.port}"


class WorthAnotherTry(Exception):
    """The host did not answer as an SSH server; it may in a moment."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(reason)
        self.host = host


def _open(hop: Hop, login: Login, gateway: fabric.Connection | None) -> fabric.Connection:
    """Return an open connection to `hop`, whose key was checked before anything was sent.

    Raises:
        ProjectError: `host_key_unknown`, `host_key_mismatch`, `login_refused`, `box_unreachable`.
        WorthAnotherTry: no answer, or not a whole one.
    """
    *others, last = hop.pinned.preferences()
    for key_types in others:
        try:
            return _open_preferring(key_types, hop, login, gateway)
        except ProjectError as error:
            if error.code != "host_key_mismatch":  # a fingerprint does not tell which of the host's keys it is of
                raise
    return _open_preferring(last, hop, login, gateway)


def _open_preferring(
    key_types: Sequence[str], hop: Hop, login: Login, gateway: fabric.Connection | None
) -> fabric.Connection:
    connection = fabric.Connection(
        hop.pinned.host,
        user=hop.user,
        port=hop.pinned.port,
        gateway=gateway,
        config=fabric.Config(overrides={"load_ssh_configs": False}),
        connect_timeout=CONNECT_TIMEOUT_S,
        connect_kwargs={
            "pkey": login.key,
            "password": login.password,
            "look_for_keys": False,
            "allow_agent": False,
            "banner_timeout": BANNER_TIMEOUT_S,
            "auth_timeout": AUTH_TIMEOUT_S,
            "channel_timeout": CONNECT_TIMEOUT_S,
            "transport_factory": lambda sock, **options: _transport(sock, key_types, **options),
        },
    )
    connection.client.set_missing_host_key_policy(PinPolicy(hop.pinned))  # Fabric's default accepts any key
    try:
        connection.open()
        connection.transport.set_keepalive(KEEPALIVE_S)
        return connection
    except BaseException as error:
        connection.client.close()
        if isinstance(error, ProjectError) or not isinstance(error, (paramiko.SSHException, OSError, EOFError)):
            raise
        raise _translated(error, hop.name) from error


def _translated(error: Exception, host: str) -> ProjectError | WorthAnotherTry:
    """Return what an exception of paramiko or the network means for the person, or for the next attempt."""
    if isinstance(error, paramiko.BadAuthenticationType):
        return ProjectError("login_refused", host=host, reason="reason.login_takes " + ", ".join(error.allowed_types))
    if isinstance(error, paramiko.AuthenticationException):
        is_plain_no = str(error).startswith("Authentication failed")
        return ProjectError("login_refused", host=host, reason="reason.login_failed" if is_plain_no else _words(error))
    is_final = isinstance(error, paramiko.ssh_exception.IncompatiblePeer) or (
        isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
    )
    if is_final:
        return ProjectError("box_unreachable", host=host, reason=_words(error))
    return WorthAnotherTry(host, _words(error))


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _transport(sock: Any, key_types: Sequence[str], **options: Any) -> paramiko.Transport:
    """Return a transport that prefers the pinned key types and sends small packets at once."""
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # 88 -> 26 ms for a login on loopback
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_LINK_MS)
    transport = paramiko.Transport(sock, **options)
    security = transport.get_security_options()
    wanted = [kind for kind in key_types if kind in security.key_types]
    security.key_types = [*wanted, *(kind for kind in security.key_types if kind not in wanted)]
    return transport


@contextmanager
def _as_network_errors() -> Iterator[None]:
    """A link that breaks while paramiko sends is an EOFError or an SSHException, by where it was."""
    try:
        yield
    except (EOFError, paramiko.SSHException) as error:
        raise ConnectionError(_words(error)) from error


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
