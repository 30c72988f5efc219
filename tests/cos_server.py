"""A small Tencent COS of the tests' own: it checks `q-sign` signatures as the service does, and nothing is mocked.

It is a web proxy, so that URLs and hosts stay the real `bucket-appid.cos.region.myqcloud.com`: `http://` by absolute
request lines, `https://` by CONNECT, where it shows a certificate that `SSL_CERT_FILE` must name. Objects lie in
memory; GET with Range, HEAD and PUT. Source of the signature's rules: the service's documentation of request
signatures, in the order of its steps.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

REGION = "ap-guangzhou"
HOST = re.compile(rf"([a-z0-9-]+-[0-9]+)\.cos\.{REGION}\.myqcloud\.com(?::\d+)?\Z")
_KEPT = "-_.~"


def make_certificate(folder: Path, *names: str) -> Path:
    """Write key and certificate of host names, signed by itself, valid today; return the file of both."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    now = datetime.datetime.now(datetime.timezone.utc)
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    certificate = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / f"{names[0].lstrip('*.')}.pem"
    path.write_bytes(private + certificate.public_bytes(pem))
    return path


class CosServer(ThreadingHTTPServer):
    """`objects` by (bucket, key); `secrets` by access key; `log` of (method, key, status)."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), CosHandler)
        self.objects: dict[tuple[str, str], bytes] = {}
        self.secrets = {"AKIDexampleexampleexample": "cos-test-secret"}
        self.log: list[tuple[str, str, int]] = []
        self.answers: list[tuple[int, bytes]] = []  # given instead of the object, in turn
        self.certificate = make_certificate(folder, f"*.cos.{REGION}.myqcloud.com")
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(self.certificate)

    @property
    def url(self) -> str:
        """What a proxy setting names."""
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """Return what makes a process reach this server for every address of COS."""
        return {
            "http_proxy": self.url, "https_proxy": self.url, "no_proxy": "", "NO_PROXY": "",
            "SSL_CERT_FILE": str(self.certificate),
        }  # fmt: skip

    def settings(self) -> dict[str, str]:
        """Return the settings whose signatures this server takes."""
        ((key_id, secret),) = self.secrets.items()
        return {"ZY_COS_SECRET_ID": key_id, "ZY_COS_SECRET_KEY": secret, "ZY_COS_REGION": REGION}


class CosHandler(BaseHTTPRequestHandler):
    """One connection: requests of its own, or a tunnel into TLS."""

    server: CosServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_CONNECT(self) -> None:
        if not HOST.match(self.path):
            return self._answer(403, b"")
        self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        self.wfile.flush()
        try:
            self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        except (OSError, ssl.SSLError):  # whoever does not trust the certificate leaves
            self.close_connection = True
            return None
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)  # type: ignore[assignment]
        self.close_connection = False
        return None

    def do_GET(self) -> None:
        bucket, key, refusal = self._check()
        if refusal is not None:
            return self._refuse(*refusal)
        if self.server.answers:
            return self._answer(*self.server.answers.pop(0))
        body = self.server.objects.get((bucket, key))
        if body is None:
            return self._refuse(404, "NoSuchKey")
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Last-Modified": self.date_time_string(0)}
        if self.headers.get("If-None-Match") == etag:
            return self._answer(304, b"", headers)
        match = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range", ""))
        if match is None or self.headers.get("If-Range") not in (None, etag):
            return self._answer(200, body, headers)
        begin, end = int(match[1]), min(int(match[2] or len(body) - 1), len(body) - 1)
        if begin >= len(body):
            return self._refuse(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(body)}"
        return self._answer(206, body[begin : end + 1], headers)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        bucket, key, refusal = self._check()
        if refusal is not None:
            return self._refuse(*refusal)
        self.server.objects[bucket, key] = body
        return self._answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _check(self) -> tuple[str, str, tuple[int, str] | None]:
        """Return bucket, key and, where the signature does not hold, status and code of the refusal."""
        host = self.headers.get("Host", "")
        match = HOST.match(host)
        parts = urlsplit(self.path)
        key = unquote(parts.path).lstrip("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        signed = {name: value for name, value in query.items() if name.startswith("q-")}
        if "Authorization" in self.headers:
            signed = dict(part.partition("=")[::2] for part in self.headers["Authorization"].split("&"))
        if match is None:
            return "", key, (400, "InvalidURI")
        others = {name: value for name, value in query.items() if not name.startswith("q-")}
        return match[1], key, self._refusal(signed, others, key, host)

    def _refusal(self, signed: dict[str, str], query: dict[str, str], key: str, host: str) -> tuple[int, str] | None:
        secret = self.server.secrets.get(signed.get("q-ak", ""))
        if secret is None:
            return 403, "InvalidAccessKeyId" if signed else "AccessDenied"
        for span in (signed["q-sign-time"], signed["q-key-time"]):
            start, _, end = span.partition(";")
            if not int(start) <= time.time() <= int(end):
                return 403, "AccessDenied Request has expired"
        hosts = {host, host.partition(":")[0]}  # the SDK signs a host of a URL without its port
        wanted = {self._signature(signed, secret, query, key, one) for one in hosts}
        given = signed.get("q-signature", "")
        return None if any(hmac.compare_digest(given, one) for one in wanted) else (403, "SignatureDoesNotMatch")

    def _signature(self, signed: dict[str, str], secret: str, query: dict[str, str], key: str, host: str) -> str:
        headers = {name.lower(): value for name, value in self.headers.items()} | {"host": host}
        parameters = {name.lower(): value for name, value in query.items()}
        lines = [
            self.command.lower(),
            "/" + key,
            _pairs(signed.get("q-url-param-list", ""), parameters),
            _pairs(signed.get("q-header-list", ""), headers),
        ]
        digest = hashlib.sha1("".join(f"{line}\n" for line in lines).encode()).hexdigest()
        text = f"sha1\n{signed['q-sign-time']}\n{digest}\n"
        return _hmac(_hmac(secret, signed["q-key-time"]), text)

    def _refuse(self, status: int, code: str) -> None:
        code, _, message = code.partition(" ")
        fields = {"Code": code, "Message": message or code, "Resource": "-", "RequestId": "1", "TraceId": "1"}
        inner = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
        text = f"<?xml version='1.0' encoding='utf-8' ?><Error>{inner}</Error>"
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.server.log.append((self.command, unquote(urlsplit(self.path).path).lstrip("/"), status))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def finish(self) -> None:
        super().finish()
        if isinstance(self.connection, ssl.SSLSocket):  # the server knows the plain socket only, which TLS took over
            self.connection.close()

    def log_message(self, *args: Any) -> None:
        pass


def _pairs(names: str, values: dict[str, str]) -> str:
    return "&".join(f"{name}={quote(values.get(name, ''), safe=_KEPT)}" for name in names.split(";") if name)


def _hmac(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha1).hexdigest()


@contextmanager
def running_cos(folder: Path) -> Iterator[CosServer]:
    """Serve COS until the block ends."""
    server = CosServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
