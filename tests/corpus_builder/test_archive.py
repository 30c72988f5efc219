"""ZIPs of any kind: every member is extracted or refused by name, and nothing leaves the folder."""

import io
import json
import stat
import struct
import zipfile
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_builder.archive import ACCOUNT_NAME, Refused, extract_archive, load_account, looks_like
from corpus_builder.archive_limits import Limits, limits_of
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
        ("inner.ZIP", "damaged"),
        (ACCOUNT_NAME, "reserved_name"),
        (f"{ACCOUNT_NAME}.1", "reserved_name"),
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


NAMES = {
    "gbk": ["冰朔.md", "乗.md", "对话/俓僜 2025.md"],  # 乗 俓 僜 end on 0x5C
    "gb18030": ["㐀冰朔的对话.md"],
    "utf-8": ["冰朔.md"],
    "big5": ["守燈人的對話.md", "許功蓋.md"],  # 許 功 蓋 end on 0x5C
    "shift_jis": ["灯台守の記録.md", "表示.md"],  # 表 ends on 0x5C
    "cp437": ["café.md", "ÿ.md", "niño.md"],
}


def zip_with_raw_names(path, names, *, flags=0, extra=b""):
    """Write a ZIP whose names are these bytes, with the UTF-8 flag as told; `zipfile` itself writes no such thing."""
    placeholders = [f"{at:03}" + "x" * (len(name) - 3) for at, name in enumerate(names)]
    with zipfile.ZipFile(path, "w") as archive:
        for name in placeholders:
            info = zipfile.ZipInfo(name)
            info.extra = extra
            archive.writestr(info, "text")
    raw = path.read_bytes()
    for placeholder, name in zip(placeholders, names, strict=True):
        raw = raw.replace(placeholder.encode(), name)
    raw = bytearray(raw)
    at = raw.index(b"PK\x01\x02")
    while raw[at : at + 4] == b"PK\x01\x02":
        raw[at + 9] |= flags
        at += 46 + int.from_bytes(raw[at + 28 : at + 30], "little") + int.from_bytes(raw[at + 30 : at + 32], "little")
    path.write_bytes(raw)
    return str(path)


@pytest.mark.parametrize("encoding", NAMES)
def test_names_without_the_utf8_flag_are_read_per_archive(tmp_path, encoding):
    path = zip_with_raw_names(tmp_path / "d.zip", [name.encode(encoding) for name in NAMES[encoding]])
    assert list(extract_archive(path, str(tmp_path / "out")).kept) == NAMES[encoding]
    assert files(tmp_path / "out") == sorted(NAMES[encoding])


def test_utf8_flag_that_lies_is_not_believed(tmp_path):
    names = ["冰朔.md".encode("gbk"), "铸渊.md".encode()]
    path = zip_with_raw_names(tmp_path / "d.zip", names, flags=8)
    assert extract_archive(path, str(tmp_path / "out")).kept == ("冰朔.md", "铸渊.md")


def test_unicode_path_beside_a_name_goes_before_it(tmp_path):
    def field(text, name):
        data = b"\x01" + struct.pack("<I", zlib.crc32(name)) + text.encode()
        return struct.pack("<HH", 0x7075, len(data)) + data

    name = b"000x.md"
    path = zip_with_raw_names(tmp_path / "a.zip", [name], extra=field("冰朔.md", b"000xxxx"))
    assert extract_archive(path, str(tmp_path / "a")).kept == ("000x.md",)  # the CRC is of another name
    path = zip_with_raw_names(tmp_path / "b.zip", [name], extra=field("冰朔.md", name))
    assert extract_archive(path, str(tmp_path / "b")).kept == ("冰朔.md",)


def zip_bytes(*members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


def test_zips_in_the_zip_become_folders_down_to_the_depth(tmp_path):
    third = zip_bytes(("d.md", "4"))
    second = zip_bytes(("c.md", "3"), ("third.zip", third))
    first = zip_bytes(("b.md", "2"), ("../x.md", "bad"), ("second.zip", second))
    path = make_zip(tmp_path / "d.zip", [("a.md", "1"), ("sub/first.zip", first), ("bad.zip", b"PK\x03\x04cut")])
    account = extract_archive(path, str(tmp_path / "out"))
    assert account.kept == ("a.md", "sub/first.zip/b.md", "sub/first.zip/second.zip/c.md")
    assert {one.name: one.reason for one in account.refused} == {
        "sub/first.zip/../x.md": "leaves_folder",
        "sub/first.zip/second.zip/third.zip": "nested_too_deep",
        "bad.zip": "damaged",
    }
    assert files(tmp_path / "out") == sorted(account.kept)


@pytest.mark.parametrize("limits", [Limits(members=3), Limits(total_bytes=400)])
def test_zips_in_the_zip_share_its_limits(tmp_path, limits):
    path = make_zip(tmp_path / "d.zip", [("big.zip", zip_bytes(("b.md", "x" * 300), ("c.md", ""))), ("a.md", "1")])
    account = extract_archive(path, str(tmp_path / "out"), limits=limits)
    assert (account.kept, account.refused) == (("a.md",), (Refused("big.zip", "beyond_limits"),))
    assert not account.holds_under(Limits())
    assert account.holds_under(limits)


def test_members_that_share_their_bytes_are_a_bomb(tmp_path):
    path = tmp_path / "d.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0.md", b"a" * (1 << 20))
        for at in range(1, 300):
            info = archive.getinfo("0.md")
            twin = zipfile.ZipInfo(f"{at}.md")
            twin.compress_type, twin.CRC = info.compress_type, info.CRC
            twin.file_size, twin.compress_size, twin.header_offset = info.file_size, info.compress_size, 0
            archive.filelist.append(twin)
        archive._didModify = True
    with pytest.raises(ProjectError, match=r"archive_refused.*limit_ratio"):
        extract_archive(str(path), str(tmp_path / "out"))


@pytest.mark.parametrize(("method", "reason"), [(9, "deflate64"), (99, "encrypted"), (97, "compression_unknown")])
def test_compression_that_is_not_read_is_named(tmp_path, method, reason):
    path = make_zip(tmp_path / "d.zip", [("a.md", "text"), ("b.md", "text")])
    raw = bytearray((tmp_path / "d.zip").read_bytes())
    raw[raw.index(b"PK\x01\x02") + 10] = method
    (tmp_path / "d.zip").write_bytes(raw)
    account = extract_archive(path, str(tmp_path / "out"))
    assert (account.kept, account.refused) == (("b.md",), (Refused("a.md", reason),))


def test_zip64_is_a_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive, archive.open("a.md", "w", force_zip64=True) as member:
        member.write(b"text")
    assert extract_archive(str(tmp_path / "d.zip"), str(tmp_path / "out")).kept == ("a.md",)


def test_folders_of_windows_tools_are_no_files(tmp_path):
    path = zip_with_raw_names(tmp_path / "d.zip", [b"chat\\", b"chat\\a.md"])
    assert extract_archive(path, str(tmp_path / "out")).kept == ("chat/a.md",)


def test_limits_come_from_the_plan():
    assert limits_of(None) == Limits() == limits_of({})
    section = {"max_members": 5, "max_gib": 0.5, "max_ratio": 20, "max_depth": 0}
    assert limits_of(section) == Limits(members=5, total_bytes=1 << 29, ratio=20, depth=0)


@pytest.mark.parametrize(
    ("limits", "word"), [(Limits(members=1), "limit_members: 2 > 1"), (Limits(total_bytes=3), "limit_bytes: 4 > 3")]
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
        archive.writestr("c.zip", zip_bytes(("对话.md", "c")))
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
