"""One SSH connection to one machine: its key checked first, then the login, then a watch on whether it still lives.

Side effects: network, and a thread per connection that asks a silent server whether it is there. Keys stay in memory.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko

from controller.addresses import CONNECT_TIMEOUT_S
from controller.host_keys import FAMILIES, PinnedKeys, PinPolicy, parse_pins
from controller.private_keys import load_private_key
from corpus_builder.errors import ProjectError

if TYPE_CHECKING:
    from controller.settings import Ssh

AUTH_TIMEOUT_S = 20
#: A server that has said nothing for this long is asked whether it is there, and every so often again.
ASK_AFTER_S = 5.0
#: One that has said nothing for this long, although it was asked, is gone: noticed within 25 s.
DEAD_AFTER_S = 20.0
_SENT_AND_NOT_TAKEN_MS = 25_000
#: What paramiko and sockets raise when the network or the server is at fault; UnicodeError: a name that is none.
NETWORK_ERRORS = (paramiko.SSHException, OSError, EOFError, UnicodeError)


#: What paramiko says, and what that means.
_OWN_WORDS = {
    "No existing session": "reason.server_silent",
    "Error reading SSH protocol banner": "reason.no_ssh_server",
}


@dataclass(frozen=True, slots=True)
class Login:
    """What proves who we are. `key` and `password` are in memory only; files and agent are a laptop's own."""

    key: paramiko.PKey | None = field(repr=False)
    password: str | None = field(repr=False)
    key_files: tuple[str, ...] = ()
    uses_agent: bool = False
    agent_only: tuple[bytes, ...] | None = None  # public halves; no other key of the agent is offered
    passphrase: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, ssh: Ssh) -> Login:
        """Return the login of a setting; raise `key_invalid`."""
        key = load_private_key(ssh.key, ssh.passphrase) if ssh.key else None
        return cls(key, ssh.password, ssh.key_files, ssh.uses_agent, ssh.agent_only, ssh.passphrase)

    @contextmanager
    def chosen_key(self) -> Iterator[paramiko.PKey | None]:
        """The key to begin with, for as long as the login takes: ours, or the one of the agent's that was named."""
        if self.key is not None or not self.agent_only:
            yield self.key
            return
        agent = paramiko.Agent()
        try:
            yield next((key for key in agent.get_keys() if key.asbytes() in self.agent_only), None)
        finally:
            agent.close()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a silent server is believed in."""

    ask_after_s: float = ASK_AFTER_S
    dead_after_s: float = DEAD_AFTER_S


class Link:
    """An open connection to one hop."""

    def __init__(self, client: paramiko.SSHClient, transport: paramiko.Transport, watch: Watch) -> None:
        self.transport = transport  # what channels are opened on
        self._client = client
        self._watch = watch

    def close(self) -> None:
        """End the connection."""
        self._watch.stop()
        self._client.close()


class BegunTransport(paramiko.Transport):
    """A transport whose key exchange begins at once, and is waited for when it is needed."""

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self._is_exchanged = threading.Event()

    def begin(self) -> None:
        """Begin the key exchange, in the transport's own thread."""
        super().start_client(event=self._is_exchanged)

    def start_client(self, event: threading.Event | None = None, timeout: float | None = None) -> None:
        """Wait `timeout` seconds at most for the end of the key exchange that was begun; raise what ended it."""
        self._is_exchanged.wait(timeout)
        if not self.is_active():
            raise self.get_exception() or paramiko.SSHException("Negotiation failed.")


@dataclass(frozen=True, slots=True)
class Begun:
    """A connection on which the keys are being exchanged."""

    transport: BegunTransport
    sock: WatchedSocket


def begin_exchange(sock: socket.socket, host: str, port: int, known_hosts: str) -> Begun:
    """Begin the key exchange with a host whose pins are in `known_hosts`; raise `known_hosts_invalid`."""
    return _begin(sock, parse_pins(known_hosts, host=host, port=port).preferences()[0])


def _begin(sock: Any, key_types: tuple[str, ...]) -> Begun:
    """Begin the key exchange, with the wish for a host key of `key_types`."""
    _hush()
    watched = WatchedSocket(sock)
    transport = BegunTransport(watched)
    transport.banner_timeout = CONNECT_TIMEOUT_S
    security = transport.get_security_options()
    wanted = [kind for kind in key_types if kind in security.key_types]
    security.key_types = [*wanted, *(kind for kind in security.key_types if kind not in wanted)]
    transport.begin()
    return Begun(transport, watched)


def _hush() -> None:
    """Keep paramiko's tracebacks from standing beside our three lines: what went wrong is raised as well."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def _connect(host: str, port: int, through: Link | None) -> Any:
    """Return a socket, or a channel of the hop before."""
    if through is None:
        return socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    return through.transport.open_channel("direct-tcpip", (host, port), ("", 0), timeout=CONNECT_TIMEOUT_S)


def open_link(
    hop: Hop,
    login: Login,
    through: Link | None,
    patience: Patience,
    *,
    begun_early: Callable[[], Begun | None] | None = None,
) -> Link:
    """Return an open link to `hop`, whose key was checked before anything was sent.

    Args:
        begun_early: Returns a connection to use in place of a new one, None when there is none any more.

    Raises:
        ProjectError: `host_key_unknown`, `host_key_mismatch`, `login_refused`, `box_unreachable`.
        WorthAnotherTry: no answer, or not a whole one.
    """
    *others, last = hop.pinned.preferences()
    for key_types in others:
        try:
            return _open_preferring(key_types, hop, login, through, patience, begun_early)
        except ProjectError as error:
            if error.code != "host_key_mismatch":  # a fingerprint does not tell which of the host's keys it is of
                raise
    return _open_preferring(last, hop, login, through, patience, begun_early)


def _open_preferring(
    key_types: tuple[str, ...],
    hop: Hop,
    login: Login,
    through: Link | None,
    patience: Patience,
    begun_early: Callable[[], Begun | None] | None,
) -> Link:
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(PinPolicy(hop.pinned))
    begun: Begun | None = None
    try:
        begun = begun_early() if begun_early is not None else None
        if begun is None:
            begun = _begin(_connect(hop.pinned.host, hop.pinned.port, through), key_types)
        with login.chosen_key() as key:
            _log_in(client, hop, login, key, begun)
    except BaseException as error:
        if begun is not None:
            begun.transport.close()
        client.close()
        if isinstance(error, ProjectError) or not isinstance(error, NETWORK_ERRORS):
            raise
        raise _translated(error, hop.name) from error
    return Link(client, begun.transport, Watch(begun.transport, begun.sock, patience))


def _log_in(client: paramiko.SSHClient, hop: Hop, login: Login, key: paramiko.PKey | None, begun: Begun) -> None:
    """Wait for the host's key, let the policy check it, and only then log in."""

    def make_transport(_: Any, **__: Any) -> paramiko.Transport:
        return begun.transport

    client.connect(
        hop.pinned.host,
        port=hop.pinned.port,
        username=hop.user,
        pkey=key,
        password=login.password,
        key_filename=[name for name in login.key_files if Path(name).is_file()],  # type: ignore[arg-type]  # it takes a list too
        passphrase=login.passphrase,
        look_for_keys=False,
        allow_agent=login.uses_agent,
        timeout=CONNECT_TIMEOUT_S,
        auth_timeout=AUTH_TIMEOUT_S,
        channel_timeout=CONNECT_TIMEOUT_S,
        sock=begun.sock,  # type: ignore[arg-type]  # it takes whatever behaves as a socket
        transport_factory=make_transport,
    )


def learn_host_keys(host: str, port: int, through: Link | None = None) -> tuple[paramiko.PKey, ...]:
    """Return every host key that a server shows, without logging in: what could be pinned, and never a proof.

    Raises:
        ProjectError, WorthAnotherTry: no answer; `box_unreachable` where another try is of no use.
    """
    found: dict[bytes, paramiko.PKey] = {}
    for family in FAMILIES:
        try:
            key = _shown_key(family, host, port, through)
        except paramiko.ssh_exception.IncompatiblePeer:
            continue  # the server has no key of this family
        except NETWORK_ERRORS as error:
            raise _translated(error, f"{host}:{port}") from error
        found[key.asbytes()] = key
    return tuple(found.values())


def _shown_key(family: Sequence[str], host: str, port: int, through: Link | None) -> paramiko.PKey:
    _hush()
    transport = paramiko.Transport(_connect(host, port, through))
    try:
        transport.banner_timeout = CONNECT_TIMEOUT_S
        security = transport.get_security_options()
        security.key_types = [kind for kind in security.key_types if kind in family]
        transport.start_client(timeout=CONNECT_TIMEOUT_S)
        return transport.get_remote_server_key()
    finally:
        transport.close()


def _translated(error: Exception, host: str) -> ProjectError | WorthAnotherTry:
    """Return what an exception of paramiko or the network means for the person, or for the next attempt."""
    if isinstance(error, paramiko.BadAuthenticationType):
        return ProjectError("login_refused", host=host, reason="reason.login_takes " + ", ".join(error.allowed_types))
    if isinstance(error, paramiko.PasswordRequiredException):
        return ProjectError("login_refused", host=host, reason="reason.key_locked")
    if isinstance(error, paramiko.AuthenticationException):
        words = reason_of(error)
        if "EOF" in words or "timeout" in words.lower():  # the link broke meanwhile: that says nothing about the login
            return WorthAnotherTry(host, words)
        is_plain_no = words.startswith("Authentication failed")
        return ProjectError("login_refused", host=host, reason="reason.login_failed" if is_plain_no else words)
    if isinstance(error, paramiko.SSHException) and "No authentication methods" in str(error):
        return ProjectError("login_refused", host=host, reason="reason.login_nothing")
    is_final = isinstance(error, (paramiko.ssh_exception.IncompatiblePeer, UnicodeError)) or (
        isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
    )
    if is_final:
        return ProjectError("box_unreachable", host=host, reason=reason_of(error))
    return WorthAnotherTry(host, reason_of(error))


def reason_of(error: BaseException) -> str:
    """Return why the network or the server failed: a sentence of ours, the system's words, or the exception's kind."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    known = next((reason for words, reason in _OWN_WORDS.items() if words in said), None)
    return known or " ".join(said.split())[:200] or type(error).__name__


class WatchedSocket:
    """A socket, or a channel of the hop before, that knows when it last heard something; small packets go at once."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.heard_at = time.monotonic()
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # 88 -> 26 ms for a login on loopback
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SENT_AND_NOT_TAKEN_MS)

    def recv(self, size: int) -> bytes:
        """Receive as the socket does."""
        data: bytes = self._sock.recv(size)
        self.heard_at = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Watch:
    """Asks a server that has fallen silent whether it is there, and closes the link to one that is not.

    TCP alone does not notice: a firewall or a proxy between may go on acknowledging what nobody reads.
    """

    def __init__(self, transport: paramiko.Transport, sock: WatchedSocket, patience: Patience) -> None:
        self._transport = transport
        self._sock = sock
        self._patience = patience
        self._is_over = threading.Event()
        self._question: threading.Thread | None = None
        threading.Thread(target=self._look, daemon=True, name="zy-watch").start()

    def stop(self) -> None:
        """End the watch."""
        self._is_over.set()

    def _look(self) -> None:
        while not self._is_over.wait(self._patience.ask_after_s) and self._transport.is_active():
            silent_s = time.monotonic() - self._sock.heard_at
            if silent_s >= self._patience.dead_after_s:
                self._transport.close()
                return
            if silent_s >= self._patience.ask_after_s and not (self._question and self._question.is_alive()):
                self._question = threading.Thread(target=self._ask, daemon=True, name="zy-ask")
                self._question.start()  # it waits for the answer, or for a full line: the watch does not

    def _ask(self) -> None:
        with suppress(*NETWORK_ERRORS):
            self._transport.global_request("keepalive@openssh.com", wait=True)
