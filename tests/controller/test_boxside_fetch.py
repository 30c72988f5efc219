"""The dialog ZIP over real HTTP: resumed, refused, told apart; and the addresses that are never asked."""

import contextlib
import datetime
import email.utils
import hashlib
import io
import json
import os
import re
import socket
import ssl
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from controller.boxside import download as download_module
from controller.boxside.addresses import is_public, parse_target, resolve
from controller.boxside.download import Link, download, is_expired
from controller.boxside.fetch import fetch_dialogs
from corpus_builder.errors import ProjectError
from trainer.run_paths import DataPaths

pytestmark = pytest.mark.e2e  # real processes: minutes, not seconds


class Store(ThreadingHTTPServer):
    """A small object storage: ETag, Range, If-Range, If-None-Match; faults are set per test."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StoreHandler)
        self.body = b""
        self.etag: str | None = '"one"'
        self.cuts: list[int] = []  # bytes after which the next answers are cut
        self.answers: list[tuple[int, dict[str, str], bytes]] = []  # given instead of the object, in turn
        self.requests: list[dict[str, str]] = []

    @property
    def allow(self) -> list[str]:
        return [f"127.0.0.1:{self.server_port}"]

    def link(self, path: str = "/bucket/dialog.zip?X-Amz-Signature=s3cr3t") -> Link:
        return Link(f"http://127.0.0.1:{self.server_port}{path}", self.allow)


class StoreHandler(BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        self.server.requests.append(dict(self.headers))
        if self.server.answers:
            return self.answer(*self.server.answers.pop(0))
        body, etag = self.server.body, self.server.etag
        if etag is not None and self.headers.get("If-None-Match") == etag:
            return self.answer(304, {"ETag": etag}, b"")
        headers = {"ETag": etag} if etag else {}
        match = re.match(r"bytes=(\d+)-$", self.headers.get("Range", ""))
        if match is None or self.headers.get("If-Range") not in (None, etag):
            return self.answer(200, headers, body)
        begin = int(match[1])
        if begin >= len(body):
            return self.answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
        headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        return self.answer(206, headers, body[begin:])

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts and status in (200, 206) else None
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def store() -> Iterator[Store]:
    server = Store()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def make_zip(text: str = "# one\n\nUser: hello\n", size: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("dialogs/秘密 one.md", text)
        archive.writestr("filler.bin", os.urandom(size))
    return buffer.getvalue()


def fetch(
    store: Store, data: Path, *, kind: str = "url", path: str | None = None, fresh: bool = False, **more: Any
) -> str:
    """Run the fetch step and return what it printed."""
    request = {
        "data": str(data), "allow": more.get("allow", store.allow),
        "dialog": {"kind": kind, "path": path, "fresh": fresh}, "limits": more.get("limits"),
    }  # fmt: skip
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        fetch_dialogs(request, {"ZY_DIALOG_URL": more.get("url", store.link().url)})
    return out.getvalue()


def dialogs(data: Path) -> list[str]:
    return sorted(path.name for path in Path(DataPaths(str(data)).dialog_pointer).resolve().rglob("*.md"))


def test_a_link_becomes_a_folder_behind_a_pointer(store, tmp_path):
    store.body = make_zip()
    said = fetch(store, tmp_path / "data")
    pointer = Path(DataPaths(str(tmp_path / "data")).dialog_pointer)
    assert pointer.is_symlink()
    assert pointer.resolve().name == hashlib.sha256(store.body).hexdigest()
    assert dialogs(tmp_path / "data") == ["秘密 one.md"]
    assert "s3cr3t" not in said
    assert not Path(DataPaths(str(tmp_path / "data")).download).exists()


def test_an_unchanged_object_is_not_sent_again(store, tmp_path):
    store.body = make_zip()
    fetch(store, tmp_path)
    said = fetch(store, tmp_path, url=store.link("/bucket/dialog.zip?X-Amz-Signature=another").url)
    assert "has not changed" in said
    assert store.requests[-1]["If-None-Match"] == '"one"'
    fetch(store, tmp_path, fresh=True)
    assert "If-None-Match" not in store.requests[-1]


def test_a_cut_download_goes_on_where_it_stopped(store, tmp_path):
    store.body = make_zip(size=300_000)
    store.cuts = [100_000, 50_000]
    found = download(store.link(), str(tmp_path / "d/zip"), sleep=lambda seconds: None)
    assert found.sha256 == hashlib.sha256(store.body).hexdigest()
    assert Path(found.path).read_bytes() == store.body
    assert [request.get("Range") for request in store.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_later_process_takes_a_partial_file_up(store, tmp_path):
    store.body = make_zip(size=300_000)
    store.cuts = [100_000] + [0] * (download_module.MAX_TRIES)
    with pytest.raises(ProjectError, match="storage_failed"):
        download(store.link(), str(tmp_path / "d/zip"), sleep=lambda seconds: None)
    store.cuts = []
    found = download(store.link("/bucket/dialog.zip?X-Amz-Signature=new"), str(tmp_path / "d/zip"))
    assert store.requests[-1]["Range"] == "bytes=100000-"
    assert found.sha256 == hashlib.sha256(store.body).hexdigest()


@pytest.mark.parametrize("etag", [None, '"two"'])
def test_a_changed_object_is_fetched_from_its_beginning(store, tmp_path, etag):
    store.body, store.cuts = make_zip(size=300_000), [100_000] + [0] * download_module.MAX_TRIES
    with pytest.raises(ProjectError):
        download(store.link(), str(tmp_path / "d/zip"), sleep=lambda seconds: None)
    store.cuts, store.body, store.etag = [], make_zip(size=200_000), etag
    found = download(store.link(), str(tmp_path / "d/zip"), sleep=lambda seconds: None)
    assert found.sha256 == hashlib.sha256(store.body).hexdigest()


def test_a_busy_storage_is_asked_again(store, tmp_path):
    store.body, store.answers = make_zip(), [(503, {}, b"slow down"), (500, {}, b"")]
    pauses: list[float] = []
    download(store.link(), str(tmp_path / "d/zip"), sleep=pauses.append)
    assert pauses == [1.0, 2.0]


EXPIRED_BODY = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"


@pytest.mark.parametrize(
    ("status", "body", "query", "code"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", "", "storage_denied"),
        (401, b"", "", "storage_denied"),
        (403, EXPIRED_BODY, "", "storage_expired"),
        (403, b"<Error><Code>AccessDenied</Code></Error>", "&Expires=1000", "storage_expired"),
        (404, b"<Error><Code>NoSuchKey</Code></Error>", "", "storage_failed"),
        (400, b"canary words", "", "storage_failed"),
    ],
)
def test_refusals_are_told_apart_and_their_bodies_never_shown(store, tmp_path, status, body, query, code):
    store.answers = [(status, {"Date": email.utils.formatdate(time.time())}, body)]
    with pytest.raises(ProjectError) as failure:
        download(store.link("/b/dialog.zip?Signature=s3cr3t" + query), str(tmp_path / "d/zip"))
    assert failure.value.code == code
    assert "s3cr3t" not in str(failure.value.to_json())
    assert "canary" not in str(failure.value.to_json())


@pytest.mark.parametrize(
    ("query", "expired"),
    [
        ("X-Amz-Date=20200101T000000Z&X-Amz-Expires=60", True),
        ("X-Amz-Date=20200101T000000Z&X-Amz-Expires=999999999", False),
        ("q-sign-time=1500000000;1500000600", True),
        ("q-sign-time=1500000000%3B9900000600", False),
        ("Expires=1500000000", True),
        ("Expires=soon", False),
        ("", False),
    ],
)
def test_a_link_says_itself_when_it_expires(query, expired):
    assert is_expired("https://bucket.example/a.zip?" + query, 1_700_000_000) is expired


def test_an_expired_link_uses_the_archive_of_an_earlier_fetch(store, tmp_path):
    store.body = make_zip()
    fetch(store, tmp_path)
    store.answers = [(403, {}, EXPIRED_BODY)]
    assert "the link has expired; the archive of an earlier fetch is used" in fetch(store, tmp_path)
    store.answers = [(403, {}, EXPIRED_BODY)]
    with pytest.raises(ProjectError, match="storage_expired"):
        fetch(store, tmp_path, fresh=True)
    store.answers = [(403, {}, EXPIRED_BODY)]
    with pytest.raises(ProjectError, match="storage_expired"):
        fetch(store, tmp_path, url=store.link("/bucket/other.zip").url)
    assert dialogs(tmp_path) == ["秘密 one.md"]


@pytest.mark.parametrize(
    ("body", "like"), [(b"<!DOCTYPE html><html>login canary", "html"), (b"<?xml version='1.0'?><Error/>", "xml")]
)
def test_a_page_saved_as_zip_is_refused_and_leaves_nothing(store, tmp_path, body, like):
    store.body = body
    with pytest.raises(ProjectError) as failure:
        fetch(store, tmp_path)
    assert (failure.value.code, failure.value.values["looks_like"]) == ("dialog_zip_not_zip", like)
    assert "canary" not in str(failure.value.to_json())
    assert not os.path.lexists(DataPaths(str(tmp_path)).dialog_pointer)


def test_a_damaged_zip_leaves_the_old_dialogs_in_place(store, tmp_path):
    store.body = make_zip()
    fetch(store, tmp_path)
    store.body, store.etag = make_zip(size=5000)[:-100], '"two"'
    with pytest.raises(ProjectError, match="dialog_zip_unreadable"):
        fetch(store, tmp_path)
    assert dialogs(tmp_path) == ["秘密 one.md"]


def test_a_full_disk_is_said_before_the_first_byte_is_written(store, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "RESERVE_BYTES", 1 << 60)
    store.body = make_zip()
    with pytest.raises(ProjectError, match="box_disk_full"):
        download(store.link(), str(tmp_path / "d/zip"))
    assert (tmp_path / "d/zip").stat().st_size == 0


def test_a_path_of_the_box_is_taken(store, tmp_path):
    path = tmp_path / "it's $(touch x).zip"
    path.write_bytes(make_zip())
    fetch(store, tmp_path / "data", kind="path", path=str(path))
    assert dialogs(tmp_path / "data") == ["秘密 one.md"]
    with pytest.raises(ProjectError, match="dialog_zip_missing"):
        fetch(store, tmp_path / "data", kind="path", path=str(tmp_path / "none.zip"))


def test_other_limits_extract_again_what_went_over_them(store, tmp_path):
    store.body = make_zip()
    with pytest.raises(ProjectError, match="archive_refused"):
        fetch(store, tmp_path, limits={"max_members": 1})
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("more.zip", store.body)
    store.body = inner.getvalue()
    assert "refused ⟦more.zip⟧: nested_too_deep" in fetch(store, tmp_path, limits={"max_depth": 0})
    assert "has not changed" in fetch(store, tmp_path, limits={"max_depth": 0})
    assert "2 file(s) kept, 0 refused" in fetch(store, tmp_path, limits={"max_depth": 1})
    assert "has not changed" in fetch(store, tmp_path, limits={"max_depth": 0})


def test_a_real_folder_in_the_pointers_place_is_moved_aside_and_said(store, tmp_path):
    real = Path(DataPaths(str(tmp_path)).dialog_pointer)
    real.mkdir(parents=True)
    (real / "mine.md").write_text("mine")
    store.body = make_zip()
    said = fetch(store, tmp_path)
    (aside,) = real.parent.glob("bingshuo-dialog.adopted-*")
    assert (aside / "mine.md").read_text() == "mine"
    assert f"⟦{aside.name}⟧" in said


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/a.zip",
        "https://localhost/a.zip",
        "https://169.254.169.254/latest/meta-data/",
        "https://[::1]/a.zip",
        "https://[::ffff:10.0.0.1]/a.zip",
        "https://0x7f000001/a.zip",
        "https://2130706433/a.zip",
        "https://10.1.2.3/a.zip",
        "http://example.com/a.zip",
        "file:///etc/passwd",
        "ftp://example.com/a.zip",
        "https://user:pw@example.com/a.zip",
        "https://exa mple.com/a.zip",
        "https:///a.zip",
        "$(touch x)",
        "",
    ],
)
def test_addresses_that_are_never_asked(store, tmp_path, url):
    with pytest.raises(ProjectError) as failure:
        fetch(store, tmp_path, url=url, allow=[])
    assert failure.value.code == "url_refused"


@pytest.mark.parametrize("location", ["http://169.254.169.254/latest", "https://127.0.0.1/x", "http://127.0.0.1:1/x"])
def test_a_redirect_is_checked_like_the_first_address(store, tmp_path, location):
    store.answers = [(302, {"Location": location}, b"")]
    with pytest.raises(ProjectError) as failure:
        download(store.link(), str(tmp_path / "d/zip"))
    assert failure.value.code == "url_refused"


def test_an_allowed_redirect_is_followed_but_not_for_ever(store, tmp_path):
    store.body = make_zip()
    store.answers = [(307, {"Location": "/elsewhere.zip"}, b"")]
    assert download(store.link(), str(tmp_path / "d/zip")).sha256 == hashlib.sha256(store.body).hexdigest()
    store.answers = [(302, {"Location": "/again"}, b"")] * 10
    with pytest.raises(ProjectError, match="redirects too often"):
        download(store.link(), str(tmp_path / "d/zip"))


def test_a_listed_host_may_be_private_but_only_a_listed_port_may_be_plain():
    assert resolve(parse_target("https://127.0.0.1/x", ["127.0.0.1"]), ["127.0.0.1"])
    with pytest.raises(ProjectError, match="it is not https"):
        parse_target("http://127.0.0.1/x", ["127.0.0.1"])
    assert parse_target("http://127.0.0.1:80/x", ["127.0.0.1:80"]).port == 80


@pytest.mark.parametrize(
    ("address", "public"),
    [("1.1.1.1", True), ("2606:4700::1111", True), ("100.100.100.200", False), ("192.168.1.1", False),
     ("224.0.0.1", False), ("fe80::1%eth0", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False)],
)  # fmt: skip
def test_what_is_public(address, public):
    assert is_public(address) is public


def test_a_proxy_of_the_boxs_environment_is_used_as_it_is(store, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{store.server_port}")
    monkeypatch.setenv("no_proxy", "")
    store.body = make_zip()
    link = Link(
        "http://bucket-1250000000.cos.ap-guangzhou.myqcloud.com/dialog.zip",
        ["bucket-1250000000.cos.ap-guangzhou.myqcloud.com:80"],
    )
    assert download(link, str(tmp_path / "d/zip")).sha256 == hashlib.sha256(store.body).hexdigest()
    assert store.requests[-1]["Host"] == "bucket-1250000000.cos.ap-guangzhou.myqcloud.com"


def make_certificate(folder: Path) -> Path:
    """Write key and certificate of `localhost`, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "localhost.pem"
    path.write_bytes(private + certificate.public_bytes(pem))
    return path


def test_a_certificate_must_be_trusted_and_of_that_name(store, tmp_path, monkeypatch):
    pem = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    store.socket = context.wrap_socket(store.socket, server_side=True)
    store.body = make_zip()
    number = iter(range(9))

    def get(host: str) -> str:
        link = Link(f"https://{host}:{store.server_port}/a.zip", [host])
        return download(link, str(tmp_path / f"d{next(number)}/zip"), sleep=lambda seconds: None).sha256

    with pytest.raises(ProjectError, match="SSLCertVerificationError"):
        get("localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    assert get("localhost") == hashlib.sha256(store.body).hexdigest()
    with pytest.raises(ProjectError, match="SSLCertVerificationError"):
        get("127.0.0.1")


def test_nothing_of_a_link_is_on_disk(store, tmp_path):
    store.body = make_zip(size=10_000)
    store.cuts = [100] + [0] * download_module.MAX_TRIES
    with pytest.raises(ProjectError):
        download(store.link(), str(tmp_path / "d/zip"), sleep=lambda seconds: None)
    about = json.loads((tmp_path / "d/zip.json").read_text())
    assert set(about) == {"source", "etag"}
    assert "s3cr3t" not in repr(store.link())
