"""Tencent COS from the runner's signature to the file on the box, over TLS, where signatures are checked."""

import hashlib

import pytest

from controller.boxside import parts
from controller.boxside.download import Link, download
from controller.objects import DialogSource, resolve_dialog
from controller.settings import Settings
from corpus_builder.errors import ProjectError
from tests.cos_server import REGION, running_cos

pytestmark = pytest.mark.e2e
BUCKET, KEY = "dialogs-1250000000", "backup/2025 冬/dialogs.zip"
BODY = b"PK\x03\x04" + bytes(range(256)) * 400


@pytest.fixture
def cos(tmp_path, monkeypatch):
    with running_cos(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        server.objects[BUCKET, KEY] = BODY
        yield server


def sdk_client(cos, *, secret: str | None = None):
    from qcloud_cos import CosConfig, CosS3Client

    ((key_id, right),) = cos.secrets.items()
    return CosS3Client(CosConfig(
        Region=REGION, SecretId=key_id, SecretKey=secret or right, Scheme="http", Proxies={"http": cos.url}
    ))  # fmt: skip


def signed_url(cos, **changes: str) -> str:
    url = resolve_dialog(f"cos://{BUCKET}/{KEY}", Settings.from_environment(cos.settings() | changes)).url
    assert url is not None
    return url


def fetch(url: str, tmp_path, **more) -> str:
    return download(Link(url, []), str(tmp_path / "box/dialog.zip"), sleep=lambda seconds: None, **more).sha256


def test_the_unchanged_sdk_passes(cos):
    client = sdk_client(cos)
    client.put_object(Bucket=BUCKET, Key="a b/中.bin", Body=b"hello")
    assert cos.objects[BUCKET, "a b/中.bin"] == b"hello"
    assert client.get_object(Bucket=BUCKET, Key="a b/中.bin")["Body"].get_raw_stream().read() == b"hello"
    ranged = client.get_object(Bucket=BUCKET, Key="a b/中.bin", Range="bytes=1-3")["Body"].get_raw_stream().read()
    assert ranged == b"ell"
    assert client.object_exists(Bucket=BUCKET, Key="a b/中.bin")


def test_a_wrong_secret_fails(cos):
    from qcloud_cos.cos_exception import CosServiceError

    with pytest.raises(CosServiceError, match="SignatureDoesNotMatch"):
        sdk_client(cos, secret="another").get_object(Bucket=BUCKET, Key=KEY)
    assert cos.log[-1] == ("GET", KEY, 403)


def test_our_link_downloads(cos, tmp_path):
    assert fetch(signed_url(cos), tmp_path) == hashlib.sha256(BODY).hexdigest()
    assert {status for _, _, status in cos.log} <= {200, 206}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("q-signature=", "q-signature=0"), "SignatureDoesNotMatch"),
        (("q-ak=AKID", "q-ak=NONE"), "InvalidAccessKeyId"),
        (("dialogs.zip", "others.zip"), "SignatureDoesNotMatch"),
    ],
)
def test_a_changed_link_is_denied_in_the_storages_own_word(cos, tmp_path, change, word):
    with pytest.raises(ProjectError, match="storage_denied") as caught:
        fetch(signed_url(cos).replace(*change), tmp_path)
    assert caught.value.values["reason"] == f"HTTP 403 {word}"


def test_a_large_object_comes_in_parts_over_tls(cos, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK_BYTES", 10_000)
    assert fetch(signed_url(cos), tmp_path) == hashlib.sha256(BODY).hexdigest()
    assert [status for _, _, status in cos.log] == [206] * (1 + -(-len(BODY) // 10_000))


def test_a_link_that_was_signed_long_ago_has_expired(cos, tmp_path, monkeypatch):
    import time

    real = time.time
    with monkeypatch.context() as past:
        past.setattr(time, "time", lambda: real() - 2 * 3600)
        url = signed_url(cos)
    with pytest.raises(ProjectError, match="storage_expired"):
        fetch(url, tmp_path)
    with pytest.raises(ProjectError, match="storage_expired"):
        DialogSource("url", "COS", url=url).check_expiry(has_archive=False)


def test_a_link_that_was_signed_in_the_future_tells_of_the_clock(cos, tmp_path, monkeypatch):
    import time

    real = time.time
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: real() + 2 * 3600)
        url = signed_url(cos)
    with pytest.raises(ProjectError, match="storage_clock_skew"):
        fetch(url, tmp_path)


def test_a_missing_object_is_said(cos, tmp_path):
    del cos.objects[BUCKET, KEY]
    with pytest.raises(ProjectError, match="storage_missing") as caught:
        fetch(signed_url(cos), tmp_path)
    assert caught.value.values["reason"] == "HTTP 404 NoSuchKey"


def test_a_busy_storage_is_asked_again(cos, tmp_path):
    cos.answers = [(503, b""), (503, b"")]
    assert fetch(signed_url(cos), tmp_path) == hashlib.sha256(BODY).hexdigest()
