"""Where the dialog ZIP comes from; links are signed for real, and fetched from servers that check them."""

import hashlib
import hmac
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from controller import objects
from controller.boxside.links import source_of
from controller.objects import is_hosted, resolve_dialog
from controller.settings import Settings
from corpus_builder.errors import ProjectError
from tests.servers import Nanio, running_nanio, running_storage

KEY = "dialogs/五月 (copy)+&=.zip"
CONTENT = b"PK\x03\x04 not really a zip"
AWS = {"AWS_ACCESS_KEY_ID": "an-access-key", "AWS_SECRET_ACCESS_KEY": "a-secret-key"}
COS = {"ZY_COS_SECRET_ID": "a-cos-id", "ZY_COS_SECRET_KEY": "a-cos-secret", "ZY_COS_REGION": "ap-guangzhou"}


def settings(**environment: str) -> Settings:
    return Settings.from_environment(environment)


def fetch(url: str | None) -> bytes:
    assert url is not None
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as answer:
        return bytes(answer.read())


@pytest.fixture(scope="module")
def nanio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nanio]:
    with running_nanio(tmp_path_factory.mktemp("nanio")) as server:
        client = server.client()
        client.create_bucket(Bucket="dialogs")
        client.put_object(Bucket="dialogs", Key=KEY, Body=CONTENT)
        client.close()
        yield server


def test_a_signed_s3_link_downloads_where_signatures_are_checked(nanio):
    source = resolve_dialog(f"s3://dialogs/{KEY}", settings(**nanio.environment()))
    assert fetch(source.url) == CONTENT
    assert (source.kind, source.shown, source.allow) == ("url", "S3", ("127.0.0.1",))


@pytest.mark.parametrize("change", [lambda url: url.replace("dialogs/%E4", "dialogs/%E5"), lambda url: url[:-1] + "x"])
def test_a_changed_link_is_refused(nanio, change):
    url = resolve_dialog(f"s3://dialogs/{KEY}", settings(**nanio.environment())).url
    assert url is not None
    assert change(url) != url
    with pytest.raises(urllib.error.HTTPError, match="403") as caught:
        fetch(change(url))
    caught.value.close()


def test_an_expired_link_is_refused(nanio, monkeypatch):
    monkeypatch.setattr(objects, "EXPIRES_S", 1)
    url = resolve_dialog(f"s3://dialogs/{KEY}", settings(**nanio.environment())).url
    time.sleep(2.1)
    with pytest.raises(urllib.error.HTTPError, match="403") as caught:
        fetch(url)
    caught.value.close()


def test_the_demos_storage_serves_its_own_uri_and_link(tmp_path: Path):
    (tmp_path / "d.zip").write_bytes(CONTENT)
    with running_storage(tmp_path / "d.zip", key=KEY) as storage:
        assert fetch(resolve_dialog(storage.uri, settings(**storage.environment())).url) == CONTENT
        given = settings(ZY_BINGSHUO_DIALOG_URL=storage.presigned_url(), ZY_FETCH_ALLOW="127.0.0.1")
        assert fetch(resolve_dialog(None, given).url) == CONTENT


def test_amazons_own_links_name_bucket_and_region():
    source = resolve_dialog("s3://my-bucket/a.zip", settings(**AWS, AWS_REGION="eu-central-1", AWS_SESSION_TOKEN="tok"))
    parts = urlsplit(source.url or "")
    assert (parts.scheme, parts.netloc) == ("https", "my-bucket.s3.eu-central-1.amazonaws.com")
    assert {"X-Amz-Security-Token", "X-Amz-Signature"} <= parse_qs(parts.query).keys()
    assert source.allow == ()


def test_a_cos_link_carries_the_signature_that_cos_computes():
    """The algorithm in the service's own words (facts/tools.md, 5), computed here a second time."""
    url = resolve_dialog(f"cos://dialogs-1250000000/{KEY}", settings(**COS)).url
    parts = urlsplit(url or "")
    host = "dialogs-1250000000.cos.ap-guangzhou.myqcloud.com"
    assert (parts.scheme, parts.netloc, parts.path) == ("https", host, "/" + quote(KEY, safe="/-_.~"))
    query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    assert (query["q-sign-algorithm"], query["q-ak"]) == ("sha1", COS["ZY_COS_SECRET_ID"])
    assert (query["q-header-list"], query["q-url-param-list"]) == ("host", "")
    start, end = map(int, query["q-sign-time"].split(";"))
    assert 0 < end - start <= objects.EXPIRES_S + 60

    def sign(key: str, text: str) -> str:
        return hmac.new(key.encode(), text.encode(), hashlib.sha1).hexdigest()

    canonical = f"get\n/{KEY}\n\nhost={quote(host, safe='-_.~')}\n"
    digest = hashlib.sha1(canonical.encode()).hexdigest()
    expected = sign(sign(COS["ZY_COS_SECRET_KEY"], query["q-key-time"]), f"sha1\n{query['q-sign-time']}\n{digest}\n")
    assert query["q-signature"] == expected


def test_the_sdk_logs_no_signing_key(caplog):
    caplog.set_level("DEBUG")
    resolve_dialog("cos://dialogs-1250000000/a.zip", settings(**COS))
    assert "sign_key" not in caplog.text
    assert "Authorization" not in caplog.text


def test_nothing_given_is_the_default_path_and_the_secret_comes_first():
    assert resolve_dialog(None, settings()).request() == {"kind": "path", "path": "~/bingshuo-dialog.zip"}
    secret = settings(ZY_BINGSHUO_DIALOG_URL="https://x.example/d.zip?sign=0123456789abcdef")
    source = resolve_dialog("  ", secret)
    assert source.request() == {"kind": "url"}
    assert source.secrets() == {"ZY_DIALOG_URL": "https://x.example/d.zip?sign=0123456789abcdef"}
    assert "0123456789abcdef" in source.masks()
    assert "0123456789" not in repr(source)
    assert resolve_dialog("/data/d.zip", secret).request() == {"kind": "path", "path": "/data/d.zip"}


def test_a_plain_link_is_taken_as_it_is():
    source = resolve_dialog("https://x.example:8443/五月.zip#part", settings())
    assert (source.url, source.masks(), source.shown) == ("https://x.example:8443/五月.zip", (), "link")


@pytest.mark.parametrize(
    "url", ["https://x.example/d.zip?sign=0123456789abcdef", "https://me:secret-word@x.example/d.zip"]
)
def test_a_link_with_its_own_key_belongs_into_the_secret(url):
    with pytest.raises(ProjectError, match="url_with_query") as caught:
        resolve_dialog(url, settings())
    assert caught.value.exit_code == 2
    assert "0123456789" not in str(caught.value)
    assert "secret-word" not in str(caught.value)


def test_plain_http_is_refused_unless_the_host_is_allowed():
    with pytest.raises(ProjectError, match="url_refused"):
        resolve_dialog("http://x.example/d.zip", settings())
    assert resolve_dialog("http://x.example/d.zip", settings(ZY_FETCH_ALLOW="x.example")).kind == "url"


@pytest.mark.parametrize(
    "text",
    [
        "-rf", "d.zip", "~user/d.zip", "~", "/", "/a/../etc/passwd", "~/a//b.zip", "/a\nb.zip", "/a\x00b", "$(id)",
        "ftp://x/y", "file:", "file://host/etc/passwd", "s3://", "s3://bucket", "s3://UPPER/key", "s3://bucket/a\nb", "cos://bucket/key",
        "cos://no-number-x/key", "https://", "https:///x", "https://x y/z", "https://x:99999/", "https://[::1/x",
        "s3:/b/k",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ProjectError) as caught:
        resolve_dialog(text, settings(**AWS, **COS))
    assert (caught.value.code, caught.value.values["name"]) == ("input_invalid", "dialog_zip")


@pytest.mark.parametrize("text", ['~/a b\'s "x" $(id).zip', "/data/对话/五月.zip"])
def test_a_path_may_hold_what_paths_hold(text):
    assert resolve_dialog(text, settings()).path == text


def test_missing_keys_are_named():
    with pytest.raises(ProjectError, match="setting_missing name=AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"):
        resolve_dialog("s3://bucket/key", settings())
    with pytest.raises(ProjectError, match="setting_missing name=ZY_COS_SECRET_KEY"):
        resolve_dialog("cos://b-1/key", settings(ZY_COS_SECRET_ID="id"))
    with pytest.raises(ProjectError, match="setting_missing name=ZY_COS_REGION"):
        resolve_dialog("cos://b-1/key", settings(ZY_COS_SECRET_ID="id", ZY_COS_SECRET_KEY="key"))


def test_a_missing_sdk_says_which_extra_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(ProjectError, match="extra_missing package=boto3 extra=objects"):
        resolve_dialog("s3://bucket/key", settings(**AWS))


@pytest.mark.parametrize(
    "form", ["file:{}", "file://{}", "./mine.zip", "../here/mine.zip", "file:mine.zip", "file:~/mine.zip"]
)
def test_a_file_of_this_machine_is_named_by_its_digest(tmp_path, monkeypatch, form):
    path = tmp_path / "here/mine.zip"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("HOME", str(path.parent))
    source = resolve_dialog(form.format(path), settings())
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert (source.request(), source.secrets()) == ({"kind": "upload", "sha256": sha256}, {})
    assert source.file is not None
    assert (source.file.size, b"".join(source.file.stream(3))) == (len(CONTENT), CONTENT[3:])
    path.write_bytes(CONTENT[:5])
    with pytest.raises(ProjectError, match="dialog_zip_unreadable"):
        list(source.file.stream(3))


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "dialog_zip_missing"), (b"<html>login", "dialog_zip_not_zip"), (b"", "dialog_zip_not_zip")],
)
def test_a_file_that_is_none_or_no_zip_is_said_before_the_box_is_asked(tmp_path, content, code):
    if content is not None:
        (tmp_path / "mine.zip").write_bytes(content)
    with pytest.raises(ProjectError, match=code):
        resolve_dialog(f"file:{tmp_path}/mine.zip", settings())
    with pytest.raises(ProjectError, match="dialog_zip_unreadable"):
        resolve_dialog(f"file:{tmp_path}", settings())


def test_on_a_machine_of_githubs_nobody_has_files(tmp_path):
    (tmp_path / "mine.zip").write_bytes(CONTENT)
    assert is_hosted({"RUNNER_ENVIRONMENT": "github-hosted"})
    assert not is_hosted({"RUNNER_ENVIRONMENT": "self-hosted"})
    with pytest.raises(ProjectError, match=r"input_invalid .*reason\.file_on_hosted"):
        resolve_dialog(f"file:{tmp_path}/mine.zip", settings(), is_on_hosted=True)


def test_a_link_that_has_expired_is_refused_unless_its_archive_is_there():
    signed = settings(ZY_BINGSHUO_DIALOG_URL="https://x.example/d.zip?Expires=1000&Signature=0123456789")
    source = resolve_dialog(None, signed)
    assert source.source_digest() == source_of("https://x.example/d.zip")
    source.check_expiry(has_archive=False, now=999)
    source.check_expiry(has_archive=True, now=1001)
    with pytest.raises(ProjectError, match=r"storage_expired source=x\.example"):
        source.check_expiry(has_archive=False, now=1001)
    assert resolve_dialog("/data/d.zip", signed).source_digest() is None
