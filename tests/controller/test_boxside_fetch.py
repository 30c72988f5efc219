"""The dialog ZIP over real HTTP: in parts, resumed, refused, told apart; and the addresses that are never asked."""

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

from controller.boxside import parts, space
from controller.boxside.addresses import is_public, parse_target, resolve
from controller.boxside.download import Link, download, is_expired
from controller.boxside.fetch import fetch_dialogs
from corpus_builder.errors import ProjectError
from trainer.run_paths import DataPaths

pytestmark = pytest.mark.e2e  # real processes: minutes, not seconds


class Store(ThreadingHTTPServer):
    """A small object storage: ETag, Range, If-Range, If-None-Match; faults are set per test.

    `cuts` count for answers that bring more than one byte: the first question is never cut.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StoreHandler)
        self.body = b""
        self.etag: str | None = '"one"'
        self.cuts: list[int] = []  # bytes after which the next answers are cut
        self.answers: list[tuple[int, dict[str, str], bytes]] = []  # given instead of the object, in turn
        self.requests: list[dict[str, str]] = []
        self.gives_parts = True
        self.heeds_if_range = True
        self.shift = 0  # parts begin so many bytes too late
        self.most_connections = self.connections = self.all_connections = 0

    @property
    def allow(self) -> list[str]:
        return [f"127.0.0.1:{self.server_port}"]

    def link(self, path: str = "/bucket/dialog.zip?X-Amz-Signature=s3cr3t") -> Link:
        return Link(f"http://127.0.0.1:{self.server_port}{path}", self.allow)


class StoreHandler(BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        self.server.connections += 1
        self.server.all_connections += 1
        self.server.most_connections = max(self.server.most_connections, self.server.connections)
        with contextlib.suppress(OSError):
            super().handle()
        self.server.connections -= 1

    def do_GET(self) -> None:
        self.server.requests.append(dict(self.headers))
        if self.server.answers:
            return self.answer(*self.server.answers.pop(0))
        body, etag = self.server.body, self.server.etag
        if etag is not None and self.headers.get("If-None-Match") == etag:
            return self.answer(304, {"ETag": etag}, b"")
        headers = {"ETag": etag} if etag else {}
        match = re.match(r"bytes=(\d+)-(\d+)$", self.headers.get("Range", ""))
        is_other = self.server.heeds_if_range and self.headers.get("If-Range") not in (None, etag)
        if match is None or is_other or not self.server.gives_parts:
            return self.answer(200, headers, body)
        begin, end = int(match[1]), min(int(match[2]), len(body) - 1)
        if end:
            begin = max(0, begin + self.server.shift)
        if begin >= len(body):
            return self.answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(body)}"
        return self.answer(206, headers, body[begin : end + 1])

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts and status in (200, 206) and len(body) > 1 else None
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
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
        "dialog": {"kind": kind, "path": path, "sha256": more.get("sha256"), "fresh": fresh},
        "limits": more.get("limits"),
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
    end = len(store.body) - 1
    asked = [request.get("Range") for request in store.requests]
    assert asked == ["bytes=0-0", f"bytes=0-{end}", f"bytes=100000-{end}", f"bytes=150000-{end}"]


def quietly(store: Store, folder: Path, query: str = "X-Amz-Signature=s3cr3t") -> Any:
    return download(store.link("/bucket/dialog.zip?" + query), str(folder / "d/zip"), sleep=lambda seconds: None)


def cut_off(store: Store, folder: Path, *, blocks: int) -> None:
    """Let a download fail when so many blocks of 50,000 bytes are whole."""
    refusal = (403, {}, b"<Error><Code>AccessDenied</Code></Error>")
    store.body = make_zip(size=300_000)

    class Refusing(list):  # type: ignore[type-arg]
        def __bool__(self) -> bool:
            return len(store.requests) > blocks + 1

        def pop(self, index: int = 0) -> Any:  # type: ignore[override]
            return refusal

    store.answers = Refusing()
    with pytest.raises(ProjectError, match="storage_denied"):
        download(store.link(), str(folder / "d/zip"), sleep=lambda seconds: None)
    store.answers, store.requests = [], []


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BLOCK_BYTES", 50_000)


@pytest.fixture
def one_stream(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_STREAMS", 1)
    monkeypatch.setattr(parts, "MAX_IN_A_ROW", 1)


def test_a_large_file_comes_over_several_connections(store, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK_BYTES", 1 << 20)
    store.body = make_zip(size=30 << 20)
    found = quietly(store, tmp_path)
    assert Path(found.path).read_bytes() == store.body
    assert found.sha256 == hashlib.sha256(store.body).hexdigest()
    assert parts.MAX_STREAMS < len(store.requests) < len(store.body) >> 20  # blocks in a row
    assert 2 <= store.most_connections <= parts.MAX_STREAMS
    assert not (tmp_path / "d/zip.json").exists()


def test_a_later_process_fetches_only_what_is_not_whole(store, tmp_path, one_stream):
    cut_off(store, tmp_path, blocks=3)
    assert sorted(json.loads((tmp_path / "d/zip.json").read_text())["crc32"]) == ["0", "1", "2"]
    found = quietly(store, tmp_path, "X-Amz-Signature=new")
    assert store.requests[1]["Range"] == "bytes=150000-199999"
    assert len(store.requests) == 1 + -(-len(store.body) // 50_000) - 3
    assert (found.sha256, Path(found.path).read_bytes()) == (hashlib.sha256(store.body).hexdigest(), store.body)


def wrong_sum(text: str) -> str:
    about = json.loads(text)
    return json.dumps({**about, "crc32": {**about["crc32"], "1": 7}})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-30],
        lambda text: "",
        lambda text: "[1]",
        wrong_sum,
        lambda text: text.replace('"crc32": {', '"crc32": {"99": 3, "-1": 4, "x": 5, '),
        lambda text: text.replace('"crc32": {', '"crc32": {"99": 3, "-1": 4, '),
        lambda text: text.replace("50000", "25000"),
        lambda text: re.sub(r'"size": \d+', '"size": 17', text),
        lambda text: re.sub(r'"crc32": .*', '"crc32": 5}', text),
        lambda text: re.sub(r'"crc32": .*', '"crc32": {"0": null}}', text),
    ],
)
def test_a_torn_or_wrong_record_never_makes_a_wrong_file(store, tmp_path, one_stream, damage):
    cut_off(store, tmp_path, blocks=3)
    record = tmp_path / "d/zip.json"
    record.write_text(damage(record.read_text()))
    found = quietly(store, tmp_path)
    assert (found.sha256, Path(found.path).read_bytes()) == (hashlib.sha256(store.body).hexdigest(), store.body)


@pytest.mark.parametrize("change", ["zeros", "shorter", "longer", "gone"])
def test_bytes_that_a_power_cut_took_back_are_fetched_again(store, tmp_path, one_stream, change):
    cut_off(store, tmp_path, blocks=3)
    path = tmp_path / "d/zip"
    with path.open("r+b") as file:
        if change == "zeros":
            file.seek(60_000)
            file.write(bytes(100))
        elif change == "shorter":
            file.truncate(120_000)
        elif change == "longer":
            file.truncate(10_000_000)
    if change == "gone":
        path.unlink()
    found = quietly(store, tmp_path)
    assert (found.sha256, path.read_bytes()) == (hashlib.sha256(store.body).hexdigest(), store.body)


@pytest.mark.parametrize("etag", [None, '"two"', 'W/"one"'])
def test_a_changed_object_is_fetched_from_its_beginning(store, tmp_path, one_stream, etag):
    cut_off(store, tmp_path, blocks=2)
    store.body, store.etag = make_zip(size=200_000), etag
    found = quietly(store, tmp_path)
    assert (found.sha256, found.etag) == (hashlib.sha256(store.body).hexdigest(), etag)


@pytest.mark.parametrize(
    ("etag", "heeds_if_range", "size"), [('"two"', True, 220_000), (None, True, 220_000), ('"two"', False, 300_000)]
)
def test_an_object_that_changes_while_it_comes_is_fetched_again(
    store, tmp_path, one_stream, etag, heeds_if_range, size
):
    old, new = make_zip(size=300_000), make_zip(size=size)
    store.body, store.heeds_if_range = old, heeds_if_range

    class Swapping(list):  # type: ignore[type-arg]
        def __bool__(self) -> bool:
            if len(store.requests) == 4:
                store.body, store.etag = new, etag
            return False

    store.answers = Swapping()
    found = quietly(store, tmp_path)
    assert (found.sha256, Path(found.path).read_bytes()) == (hashlib.sha256(new).hexdigest(), new)


@pytest.mark.parametrize(("gives_parts", "etag"), [(False, '"one"'), (True, None), (True, 'W/"one"'), (False, None)])
def test_a_storage_that_gives_no_parts_is_read_in_one_stream(store, tmp_path, small_blocks, gives_parts, etag):
    store.body, store.gives_parts, store.etag = make_zip(size=300_000), gives_parts, etag
    store.cuts = [100_000]
    found = quietly(store, tmp_path)
    assert (found.sha256, Path(found.path).read_bytes()) == (hashlib.sha256(store.body).hexdigest(), store.body)
    assert len(store.requests) == (3 if gives_parts else 2)


@pytest.mark.parametrize("shift", [100, -100])
def test_a_storage_that_sends_other_parts_than_asked_for_is_read_in_one_stream(store, tmp_path, one_stream, shift):
    store.body, store.shift = make_zip(size=300_000), shift
    assert quietly(store, tmp_path).sha256 == hashlib.sha256(store.body).hexdigest()
    assert "Range" not in store.requests[-1]


def test_one_stream_is_one_connection(store, tmp_path, one_stream):
    store.body = make_zip(size=300_000)
    quietly(store, tmp_path)
    assert (store.all_connections, len(store.requests)) == (1, 1 + -(-len(store.body) // 50_000))


def test_an_empty_object_is_said_to_be_no_zip(store, tmp_path):
    store.body = b""
    assert quietly(store, tmp_path).sha256 == hashlib.sha256(b"").hexdigest()
    with pytest.raises(ProjectError, match="dialog_zip"):
        fetch(store, tmp_path / "data")


def test_streams_that_are_turned_away_leave_the_work_to_the_others(store, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK_BYTES", 100_000)
    store.body = make_zip(size=3_000_000)
    asked: list[int] = []

    class Full(list):  # type: ignore[type-arg]
        def __bool__(self) -> bool:
            asked.append(1)
            return len(asked) % 3 == 0

        def pop(self, index: int = 0) -> Any:  # type: ignore[override]
            return (503, {}, b"<Error><Code>SlowDown</Code></Error>")

    store.answers = Full()
    assert quietly(store, tmp_path).sha256 == hashlib.sha256(store.body).hexdigest()


def test_a_storage_that_never_delivers_is_given_up(store, tmp_path, small_blocks):
    store.body, store.cuts = make_zip(size=300_000), [0] * 1000
    with pytest.raises(ProjectError, match="storage_failed"):
        quietly(store, tmp_path)
    assert len(store.requests) <= 1 + parts.MAX_STREAMS * parts.MAX_TRIES


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
        (404, b"<Error><Code>NoSuchKey</Code></Error>", "", "storage_missing"),
        (403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>", "&Expires=9999999999", "storage_clock_skew"),
        (403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>", "&Expires=1000", "storage_expired"),
        (403, b"<Error><Code>AccessDenied</Code></Error>", "&X-Amz-Date=20990101T000000Z", "storage_clock_skew"),
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


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<Error><Code>SignatureDoesNotMatch</Code><Message>canary</Message>", "HTTP 403 SignatureDoesNotMatch"),
        (b"<Error><Code>InvalidAccessKeyId</Code></Error>", "HTTP 403 InvalidAccessKeyId"),
        (b'{"code": "AccessDenied"}', "HTTP 403 AccessDenied"),
        (b"<Error><Code>CanaryWord</Code></Error>", "HTTP 403"),
        (b"<Code>NoSuchKeyCanary</Code>", "HTTP 403"),
        (b"", "HTTP 403"),
    ],
)
def test_only_known_words_of_a_refusal_are_repeated(store, tmp_path, body, reason):
    store.answers = [(403, {}, body)]
    with pytest.raises(ProjectError, match="storage_denied") as failure:
        quietly(store, tmp_path)
    assert failure.value.values["reason"] == reason


def test_a_page_behind_an_expired_link_says_that_it_has_expired(store, tmp_path):
    store.body = b"<html>This link is no longer valid. canary"
    with pytest.raises(ProjectError, match="storage_expired"):
        quietly(store, tmp_path, "Expires=1000")
    with pytest.raises(ProjectError, match="dialog_zip_not_zip"):
        quietly(store, tmp_path, "Expires=99999999999")
    assert list((tmp_path / "d").iterdir()) == []


def test_a_link_that_expires_on_the_way_keeps_what_has_come(store, tmp_path, one_stream):
    cut_off(store, tmp_path, blocks=2)
    store.answers = [(403, {}, EXPIRED_BODY)]
    with pytest.raises(ProjectError, match="storage_expired"):
        quietly(store, tmp_path)
    assert len(json.loads((tmp_path / "d/zip.json").read_text())["crc32"]) == 2


def test_an_earlier_archive_is_known_also_when_the_pointer_leads_elsewhere(store, tmp_path):
    store.body = make_zip()
    fetch(store, tmp_path)
    first = os.readlink(DataPaths(str(tmp_path)).dialog_pointer)
    other = tmp_path / "other.zip"
    other.write_bytes(make_zip("# two\n\nUser: other\n"))
    fetch(store, tmp_path, kind="path", path=str(other))
    assert os.readlink(DataPaths(str(tmp_path)).dialog_pointer) != first
    store.answers = [(403, {}, EXPIRED_BODY)]
    assert "the link has expired" in fetch(store, tmp_path)
    assert os.readlink(DataPaths(str(tmp_path)).dialog_pointer) == first


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
    monkeypatch.setattr(space, "RESERVE_BYTES", 1 << 60)
    store.body = make_zip()
    for gives_parts in (True, False):
        store.gives_parts = gives_parts
        with pytest.raises(ProjectError, match="box_disk_full"):
            quietly(store, tmp_path)
    assert sum(path.stat().st_size for path in (tmp_path / "d").iterdir()) == 0


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


def upload(data: Path, content: bytes) -> str:
    sha256 = hashlib.sha256(content).hexdigest()
    path = Path(DataPaths(str(data)).upload(sha256))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return sha256


def test_an_upload_is_extracted_and_goes(store, tmp_path):
    sha256 = upload(tmp_path, make_zip())
    old = Path(DataPaths(str(tmp_path)).upload("a" * 64) + ".partial")
    old.write_bytes(b"of another day")
    os.utime(old, (0, 0))
    fetch(store, tmp_path, kind="upload", sha256=sha256)
    assert dialogs(tmp_path) == ["秘密 one.md"]
    assert list(old.parent.iterdir()) == []
    assert "is there already" in fetch(store, tmp_path, kind="upload", sha256=sha256)
    with pytest.raises(ProjectError, match="dialog_zip_missing"):
        fetch(store, tmp_path, kind="upload", sha256="b" * 64)


def test_an_upload_of_other_bytes_is_refused_and_goes(store, tmp_path):
    path = Path(DataPaths(str(tmp_path)).upload(upload(tmp_path, make_zip())))
    path.write_bytes(make_zip("another"))
    with pytest.raises(ProjectError, match="dialog_zip_unreadable"):
        fetch(store, tmp_path, kind="upload", sha256=path.stem)
    assert not path.exists()


def test_an_upload_that_went_over_a_limit_stays_for_other_limits(store, tmp_path):
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("more.zip", make_zip())
        archive.writestr("one.md", "User: one")
    sha256 = upload(tmp_path, inner.getvalue())
    fetch(store, tmp_path, kind="upload", sha256=sha256, limits={"max_depth": 0})
    assert dialogs(tmp_path) == ["one.md"]
    fetch(store, tmp_path, kind="upload", sha256=sha256, limits={"max_depth": 1})
    assert dialogs(tmp_path) == ["one.md", "秘密 one.md"]
    assert not Path(DataPaths(str(tmp_path)).upload(sha256)).exists()


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


def test_nothing_of_a_link_is_on_disk(store, tmp_path, one_stream):
    cut_off(store, tmp_path, blocks=2)
    record = (tmp_path / "d/zip.json").read_text()
    assert set(json.loads(record)) == {"source", "etag", "size", "block_bytes", "crc32"}
    assert "s3cr3t" not in record + repr(store.link())
