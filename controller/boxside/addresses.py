"""An HTTP connection to an address that was looked at first: https, public, again at each redirect.

Runs on the box: standard library and Python 3.8 only. Side effects: network. A name is resolved once, what it
resolves to is checked, and that very address is connected to; so no second answer of a name server counts. A host
in `allow` may be private; `host:port` there may also be plain http. A proxy of the box's own environment is used
as it is; then the proxy resolves, and what our own resolver knows of the name is checked.
"""

import base64
import contextlib
import http.client
import ipaddress
import socket
import ssl
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from corpus_builder.errors import Named, ProjectError

MAX_REDIRECTS = 5
TIMEOUT_S = 60.0
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True)
class Target:
    """Where a URL leads."""

    scheme: str
    host: str
    port: int
    path: str

    def is_allowed(self, allow: Sequence[str]) -> bool:
        """Whether a person listed the host, or host and port, in ZY_FETCH_ALLOW."""
        return self.host in allow or self.is_port_allowed(allow)

    def is_port_allowed(self, allow: Sequence[str]) -> bool:
        """Whether exactly this port of the host is listed: then it may be plain http."""
        return "%s:%d" % (self.host, self.port) in allow


def parse_target(url: str, allow: Sequence[str]) -> Target:
    """Return where `url` leads; raise `url_refused` unless it is https, or a listed port."""
    try:
        parts = urllib.parse.urlsplit(url.strip())
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise refused("", "it cannot be read") from None
    if parts.scheme not in _PORTS or not host:
        raise refused(host, "it is no https address")
    if parts.username is not None or parts.password is not None:
        raise refused(host, "it holds a user name")
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
        "?" + parts.query if parts.query else ""
    )
    if any(ord(letter) <= 32 or ord(letter) > 126 for letter in path + host):
        raise refused(host, "it holds characters that must be encoded")
    target = Target(parts.scheme, host, port or _PORTS[parts.scheme], path)
    if target.scheme != "https" and not target.is_port_allowed(allow):
        raise refused(host, "it is not https")
    return target


def refused(host: str, reason: str) -> ProjectError:
    """Return the refusal of an address."""
    return ProjectError("url_refused", host=Named(host), reason=reason)


def resolve(target: Target, allow: Sequence[str]) -> List[Tuple[Any, ...]]:
    """Return the addresses of a host; raise `url_refused` when one of them is not public and the host not listed."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConnectionError("the name %s cannot be resolved" % type(error).__name__) from error
    if not target.is_allowed(allow):
        for _, _, _, _, address in found:
            if not is_public(str(address[0])):
                raise refused(target.host, "it leads to an address that is not public")
    return list(found)


def is_public(address: str) -> bool:
    """Whether an address is reachable from everywhere: not loopback, link-local, private, shared or reserved."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if parsed in ipaddress.ip_network("64:ff9b::/96"):  # NAT64 (RFC 6052): the last 32 bits are IPv4
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
    return parsed.is_global and not parsed.is_multicast


@contextlib.contextmanager
def open_url(url: str, headers: Dict[str, str], allow: Sequence[str]) -> Iterator[http.client.HTTPResponse]:
    """Yield the answer to a GET, redirects followed; each hop is checked like the first.

    Raises:
        ProjectError: `url_refused`.
        OSError, http.client.HTTPException: the connection failed.
    """
    with contextlib.closing(Caller(url, allow)) as caller, caller.get(headers) as response:
        yield response


@dataclass(frozen=True)
class _Way:
    """An open connection to where a URL has led, and what is asked for there."""

    url: str
    connection: http.client.HTTPConnection
    sock: socket.socket
    path: str
    more: Dict[str, str]


class _WholeHead(http.client.HTTPResponse):
    """An answer whose head has come to its end.

    `http.client` takes a connection that is cut within the head for the end of the head: no length is told then, and
    nothing at all is a whole body.
    """

    def begin(self) -> None:
        answer: Any = self
        watched = answer.fp = _LastLine(answer.fp)
        super().begin()
        if answer.fp is watched:  # else there is no body, and it is closed already
            answer.fp = watched.file
        if watched.line not in (b"\r\n", b"\n"):
            self.close()
            raise http.client.IncompleteRead(b"")


class _LastLine:
    """A file that remembers the last line that was read of it."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.line = b""

    def readline(self, *limit: int) -> bytes:
        self.line = self.file.readline(*limit)
        return self.line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Caller:
    """Asks for one URL, again and again, over one connection as long as that lasts.

    For one thread; `abort` is for any other.
    """

    def __init__(self, url: str, allow: Sequence[str]) -> None:
        self._url = url
        self._allow = allow
        self._way: Optional[_Way] = None

    @contextlib.contextmanager
    def get(self, headers: Dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to a GET; whoever has read all of it closes it, and the connection is kept.

        Raises:
            ProjectError: `url_refused`.
            OSError, http.client.HTTPException: the connection failed.
        """
        is_whole = False
        try:
            response = self._ask(headers)
            with contextlib.closing(response):
                yield response
                is_whole = response.isclosed() and not response.will_close
        finally:
            if not is_whole:
                self.close()

    def _ask(self, headers: Dict[str, str]) -> http.client.HTTPResponse:
        if self._way is not None:
            try:
                return self._follow(self._way, headers)
            except (OSError, http.client.HTTPException):
                self.close()  # it was kept too long: the other side has gone home
        return self._follow(self._open(self._url), headers)

    def _follow(self, way: _Way, headers: Dict[str, str]) -> http.client.HTTPResponse:
        for _ in range(MAX_REDIRECTS + 1):
            way.connection.request("GET", way.path, headers=dict(headers, **way.more))
            response = way.connection.getresponse()
            location = response.getheader("Location")
            if response.status not in _REDIRECTS or not location:
                return response
            response.close()
            self.close()
            way = self._open(urllib.parse.urljoin(way.url, location))
        raise refused(parse_target(way.url, self._allow).host, "it redirects too often")

    def _open(self, url: str) -> _Way:
        target = parse_target(url, self._allow)
        connection, path, more = _connect(target, self._allow)
        connection.response_class = _WholeHead
        connection.auto_open = 0  # it would ask for the name again, and nobody would look at the answer
        self._way = _Way(url, connection, connection.sock, path, more)
        return self._way

    def close(self) -> None:
        """Let go of the connection; the next question makes a new one."""
        way, self._way = self._way, None
        if way is not None:
            way.connection.close()

    def abort(self) -> None:
        """Wake the thread that reads or writes: its connection ends."""
        way = self._way
        if way is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(way.sock, socket.SHUT_RDWR)  # not TLS's own, which waits for the other side


def _connect(target: Target, allow: Sequence[str]) -> Tuple[http.client.HTTPConnection, str, Dict[str, str]]:
    """Return an open connection, the words to ask for, and headers for a proxy."""
    proxy = _find_proxy(target)
    if proxy is None:
        return _direct(target, resolve(target, allow)), target.path, {}
    try:
        resolve(target, allow)
    except ConnectionError:
        pass  # behind a proxy, names may be known to it alone
    host, port = proxy.hostname or "", proxy.port or 80
    login = {"Proxy-Authorization": "Basic " + _basic(proxy)} if proxy.username else {}
    default = target.port == _PORTS[target.scheme]
    authority = target.host if default else "%s:%d" % (target.host, target.port)
    if target.scheme == "http":
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        return _opened(connection), "http://%s%s" % (authority, target.path), login
    secure = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=ssl.create_default_context())
    secure.set_tunnel(target.host, target.port, headers=login)
    return _opened(secure), target.path, {}


def _opened(connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
    try:
        connection.connect()
    except BaseException:
        connection.close()
        raise
    return connection


def _find_proxy(target: Target) -> Optional[urllib.parse.SplitResult]:
    address = urllib.request.getproxies().get(target.scheme)
    if not address or urllib.request.proxy_bypass(target.host):
        return None
    return urllib.parse.urlsplit(address if "://" in address else "http://" + address)


def _basic(proxy: urllib.parse.SplitResult) -> str:
    login = "%s:%s" % (urllib.parse.unquote(proxy.username or ""), urllib.parse.unquote(proxy.password or ""))
    return base64.b64encode(login.encode("utf-8")).decode("ascii")


def _direct(target: Target, addresses: Sequence[Tuple[Any, ...]]) -> http.client.HTTPConnection:
    """Return a connection to one of the checked addresses; the certificate must be that of the host's name."""
    if target.scheme == "http":
        connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
        connection.sock = _open_socket(addresses)
        return connection
    context = ssl.create_default_context()
    secure = http.client.HTTPSConnection(target.host, target.port, timeout=TIMEOUT_S, context=context)
    plain = _open_socket(addresses)
    try:
        secure.sock = context.wrap_socket(plain, server_hostname=target.host)
    except BaseException:
        plain.close()
        raise
    return secure


def _open_socket(addresses: Sequence[Tuple[Any, ...]]) -> socket.socket:
    """Return a socket connected to the first address that answers."""
    last: OSError = ConnectionError("no address")
    for family, kind, protocol, _, address in addresses:
        opened = socket.socket(family, kind, protocol)
        opened.settimeout(TIMEOUT_S)
        try:
            opened.connect(address)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            opened.close()
            last = error
        else:
            return opened
    raise last
