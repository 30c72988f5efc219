"""ZIPs of any kind: every member is extracted or refused by name, and nothing leaves the folder."""

import io
import json
import stat
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_builder.archive import ACCOUNT_NAME, Limits, Refused, extract_archive, load_account, looks_like
from corpus_builder.errors import ProjectError


def make_zip(path, members, *, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return str(path)


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != ACCOUNT_NAME)


def test_members_lie_in_the_folder_with_an_account(tmp_path):
    account = extract_archive(
        make_zip(tmp_path / "d.zip", [("a.md", "1"), ("sub/对话.md", "22"), ("empty/", "")]), str(tmp_path / "out")
    )
    assert files(tmp_path / "out") == ["a.md", "sub/对话.md"]
    assert (account.kept, account.refused, account.bytes) == (("a.md", "sub/对话.md"), (), 3)
    assert load_account(str(tmp_path / "out")) == account
    assert stat.S_IMODE((tmp_path / "out/a.md").stat().st_mode) == 0o600
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/etc/x.md", "absolute_path"),
        ("C:/x.md", "absolute_path"),
        ("C:\\x.md", "absolute_path"),
        ("../x.md", "leaves_folder"),
        ("a/..\\../x.md", "leaves_folder"),
        ("a\nb.md", "bad_name"),
        ("n" * 300 + ".md", "name_too_long"),
        ("__MACOSX/._a.md", "system_file"),
        ("sub/.DS_Store", "system_file"),
        ("inner.ZIP", "nested_zip"),
        (ACCOUNT_NAME, "reserved_name"),
    ],
)
def test_member_is_refused_by_name_and_the_others_go_in(tmp_path, name, reason):
    info = zipfile.ZipInfo("x")
    info.filename = name
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        archive.writestr(info, "bad")
        archive.writestr("good.md", "good")
    account = extract_archive(str(tmp_path / "d.zip"), str(tmp_path / "out"))
    assert [one.reason for one in account.refused] == [reason]
    assert account.kept == ("good.md",)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.zip", "out"]


def test_link_is_refused(tmp_path):
    info = zipfile.ZipInfo("link.md")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    account = extract_archive(make_zip(tmp_path / "d.zip", [(info, "/etc/passwd")]), str(tmp_path / "out"))
    assert account.refused == (Refused("link.md", "link"),)


def test_bomb_and_encrypted_and_damaged_members_are_refused(tmp_path):
    path = make_zip(tmp_path / "d.zip", [("bomb.md", b"\0" * (8 << 20)), ("e.md", "secret"), ("z.md", "whole text")])
    raw = bytearray((tmp_path / "d.zip").read_bytes())
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
        place = archive.getinfo("z.md").header_offset + 30 + len("z.md")
    raw[place + 2] ^= 0xFF
    second = raw.index(b"PK\x01\x02", raw.index(b"PK\x01\x02", directory) + 4)
    raw[second + 8] |= 1  # the encrypted flag of e.md
    (tmp_path / "d.zip").write_bytes(raw)
    account = extract_archive(path, str(tmp_path / "out"), limits=Limits(ratio=100))
    assert {one.name: one.reason for one in account.refused} == {
        "bomb.md": "bomb", "e.md": "encrypted", "z.md": "damaged",
    }  # fmt: skip
    assert files(tmp_path / "out") == []


def test_two_members_of_one_name_are_numbered(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = make_zip(tmp_path / "d.zip", [("a.md", "1"), ("a.md", "2"), ("a (2).md", "3")])
    account = extract_archive(path, str(tmp_path / "out"))
    assert account.kept == ("a.md", "a (2).md", "a (2) (2).md")
    assert (tmp_path / "out/a (2).md").read_text() == "2"


def test_folder_where_a_file_lies_is_a_conflict(tmp_path):
    account = extract_archive(make_zip(tmp_path / "d.zip", [("a", "1"), ("a/b.md", "2")]), str(tmp_path / "out"))
    assert account.refused == (Refused("a/b.md", "name_conflict"),)


@pytest.mark.parametrize("encoding", ["gbk", "utf-8", "cp437"])
def test_names_without_the_utf8_flag_are_read_per_archive(tmp_path, encoding):
    names = {"gbk": ["冰朔.md", "誠.md"], "utf-8": ["冰朔.md"], "cp437": ["café.md", "ÿ.md"]}[encoding]
    placeholders = ["x" * len(name.encode(encoding)) for name in names]
    placeholders = [f"{at}{text[1:]}" for at, text in enumerate(placeholders)]
    make_zip(tmp_path / "d.zip", [(name, "text") for name in placeholders], compression=zipfile.ZIP_STORED)
    raw = (tmp_path / "d.zip").read_bytes()
    for placeholder, name in zip(placeholders, names, strict=True):
        raw = raw.replace(placeholder.encode(), name.encode(encoding))
    (tmp_path / "d.zip").write_bytes(raw)
    assert list(extract_archive(str(tmp_path / "d.zip"), str(tmp_path / "out")).kept) == names


@pytest.mark.parametrize(
    ("limits", "word"), [(Limits(members=1), "members"), (Limits(total_bytes=3), "bytes unpacked")]
)
def test_archive_over_a_limit_is_refused_whole(tmp_path, limits, word):
    path = make_zip(tmp_path / "d.zip", [("a.md", "12"), ("b.md", "34")])
    with pytest.raises(ProjectError, match=f"archive_refused.*{word}"):
        extract_archive(path, str(tmp_path / "out"), limits=limits)
    assert [p.name for p in tmp_path.iterdir()] == ["d.zip"]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"), (b" \n", "empty"), (b"<!DOCTYPE html><html>", "html"), (b"\xef\xbb\xbf<HTML>", "html"),
        (b"<?xml version='1.0'?><Error/>", "xml"), (b'{"code": 403}', "json"), (b"not found", "text"),
        (b"\x1f\x8b\x08\x00", "gzip"), (b"\x89PNG\x00", "binary"),
    ],
)  # fmt: skip
def test_file_that_is_no_zip_says_what_it_looks_like(tmp_path, data, kind):
    assert looks_like(data) == kind
    (tmp_path / "d.zip").write_bytes(data)
    with pytest.raises(ProjectError, match="dialog_zip_not_zip") as caught:
        extract_archive(str(tmp_path / "d.zip"), str(tmp_path / "out"))
    assert caught.value.values["looks_like"] == kind


def test_cut_zip_is_unreadable_and_a_missing_one_is_missing(tmp_path):
    path = make_zip(tmp_path / "d.zip", [("a.md", "text")])
    (tmp_path / "d.zip").write_bytes((tmp_path / "d.zip").read_bytes()[:-30])
    with pytest.raises(ProjectError, match="dialog_zip_unreadable"):
        extract_archive(path, str(tmp_path / "out"))
    with pytest.raises(ProjectError, match="dialog_zip_missing"):
        extract_archive(str(tmp_path / "none.zip"), str(tmp_path / "out"))


def test_new_archive_replaces_the_folder_and_is_never_merged(tmp_path):
    extract_archive(make_zip(tmp_path / "1.zip", [("old.md", "1")]), str(tmp_path / "out"))
    extract_archive(make_zip(tmp_path / "2.zip", [("new.md", "2")]), str(tmp_path / "out"))
    assert files(tmp_path / "out") == ["new.md"]
    assert json.loads((tmp_path / "out" / ACCOUNT_NAME).read_text())["kept"] == ["new.md"]
    assert load_account(str(tmp_path)) is None


def small_zip():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.md", "hello " * 9)
        archive.writestr("sub/b.md", "b")
    return buffer.getvalue()


SMALL = small_zip()
damage = st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.binary(max_size=80) | damage)
def test_any_bytes_are_extracted_or_refused(tmp_path, data):
    if isinstance(data, list):
        raw = bytearray(SMALL)
        for at, value in data:
            raw[at] = value
        data = bytes(raw)
    (tmp_path / "d.zip").write_bytes(data)
    try:
        account = extract_archive(str(tmp_path / "d.zip"), str(tmp_path / "out"))
        assert files(tmp_path / "out") == sorted(account.kept)
    except ProjectError:
        pass
    assert {p.name for p in tmp_path.iterdir()} <= {"d.zip", "out"}
