"""A dialog ZIP -> a folder: every member is in it, or refused by name with a reason.

Runs on the box too: standard library and Python 3.8 only. Side effects: writes `target_dir` (by rename, never
merged) with an account beside the members:

    .zy-archive.json   {"kept": ["a.md"], "refused": [{"name": "../b.md", "reason": "leaves_folder"}], "bytes": 12}
"""

import errno
import json
import lzma
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from corpus_builder.errors import ProjectError

ACCOUNT_NAME = ".zy-archive.json"
_UTF8_FLAG, _ENCRYPTED_FLAG = 0x800, 0x1
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}
#: Small members may be compressed by any ratio: a page of blanks is no bomb.
_RATIO_FROM_BYTES = 1024 * 1024
_MAX_NAME_BYTES = 255  # NAME_MAX of Linux file systems
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
#: What `zipfile` and its decompressors raise over damaged bytes.
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, struct.error,
    ValueError, OverflowError, IndexError,
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """How much an archive may hold. Chosen: a hundred times the first user's archive."""

    members: int = 100000
    total_bytes: int = 16 * 1024**3
    ratio: int = 1000  # deflate's own limit is 1032 : 1; text of any kind stays under 100 : 1


@dataclass(frozen=True)
class Refused:
    """A member that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ArchiveAccount:
    """What became of each member (folders are not counted)."""

    kept: Tuple[str, ...]
    refused: Tuple[Refused, ...]
    bytes: int


def extract_archive(zip_path: str, target_dir: str, *, limits: Limits = Limits()) -> ArchiveAccount:
    """Extract the ZIP into `target_dir`, which is whole when it appears, and return the account.

    Raises:
        ProjectError: `dialog_zip_missing`, `dialog_zip_unreadable`, `dialog_zip_not_zip`, `archive_refused`.
    """
    partial_dir = target_dir.rstrip("/") + ".partial"
    shutil.rmtree(partial_dir, ignore_errors=True)
    members: List[zipfile.ZipInfo] = []
    try:
        with _opened(zip_path) as archive:
            members = _checked_members(archive, zip_path, limits)
            os.makedirs(partial_dir, mode=0o700)
            account = _extract_members(archive, members, partial_dir, limits)
        _save_account(account, partial_dir)
        _swap_in(partial_dir, target_dir)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _disk_full(target_dir, members) from error
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)
    return account


def _disk_full(target_dir: str, members: List[zipfile.ZipInfo]) -> ProjectError:
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(target_dir))).free
    needed = sum(member.file_size for member in members)
    return ProjectError(
        "box_disk_full", path=target_dir, free_gib=round(free / 1024**3, 1), needed_gib=round(needed / 1024**3, 1)
    )


def load_account(folder: str) -> Optional[ArchiveAccount]:
    """Return the account of an extracted archive; None where the folder did not come from one."""
    try:
        with open(os.path.join(folder, ACCOUNT_NAME), encoding="utf-8") as file:
            packed = json.load(file)
        refused = tuple(Refused(one["name"], one["reason"]) for one in packed["refused"])
        return ArchiveAccount(tuple(packed["kept"]), refused, packed["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _opened(zip_path: str) -> zipfile.ZipFile:
    if not os.path.isfile(zip_path):
        raise ProjectError("dialog_zip_missing", path=zip_path)
    with open(zip_path, "rb") as file:
        head = file.read(512)
    try:
        return zipfile.ZipFile(zip_path)
    except _DAMAGED as error:
        if head.startswith(b"PK"):
            raise ProjectError("dialog_zip_unreadable", path=zip_path, reason=_short(error)) from error
        raise ProjectError("dialog_zip_not_zip", path=zip_path, looks_like=looks_like(head)) from error
    except OSError as error:
        raise ProjectError("dialog_zip_unreadable", path=zip_path, reason=_short(error)) from error


def _short(error: BaseException) -> str:
    """Only the kind of a failure: its words may hold a member's name."""
    return type(error).__name__


def looks_like(head: bytes) -> str:
    """Return what a file that is no ZIP begins like: html, xml, json, text, gzip, empty or binary."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "text"
    start = head.replace(b"\xef\xbb\xbf", b"", 1).lstrip().lower()
    if not start:
        return "empty"
    if re.match(rb"<(!doctype\s+html|html|head|body)", start):
        return "html"
    if start.startswith(b"<"):
        return "xml"
    if start.startswith((b"{", b"[")):
        return "json"
    return "binary" if re.search(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]", head) else "text"


def _checked_members(archive: zipfile.ZipFile, zip_path: str, limits: Limits) -> List[zipfile.ZipInfo]:
    members = [member for member in archive.infolist() if not _is_folder(member)]
    if len(members) > limits.members:
        raise ProjectError(
            "archive_refused", path=zip_path, reason="%d members, at most %d" % (len(members), limits.members)
        )
    total = sum(member.file_size for member in members)
    if total > limits.total_bytes:
        raise ProjectError(
            "archive_refused", path=zip_path, reason="%d bytes unpacked, at most %d" % (total, limits.total_bytes)
        )
    return members


def _is_folder(member: zipfile.ZipInfo) -> bool:
    return member.orig_filename.endswith("/")


def _extract_members(
    archive: zipfile.ZipFile, members: List[zipfile.ZipInfo], folder: str, limits: Limits
) -> ArchiveAccount:
    kept: List[str] = []
    refused: List[Refused] = []
    taken: Dict[str, int] = {}
    total = 0
    encoding = _name_encoding(members)
    for member in members:
        name = _decoded_name(member, encoding)
        parts = _parts(name)
        reason = _refusal(member, name, parts, limits)
        if reason is None:
            path = _free_name("/".join(parts), taken)
            reason = _extract_member(archive, member, os.path.join(folder, *path.split("/")))
        if reason is None:
            kept.append(path)
            total += member.file_size
        else:
            refused.append(Refused(name, reason))
    return ArchiveAccount(tuple(kept), tuple(refused), total)


def _name_encoding(members: List[zipfile.ZipInfo]) -> str:
    """Return the encoding of the names without the UTF-8 flag: one for the whole archive."""
    raw = [_raw_name(member) for member in members if not member.flag_bits & _UTF8_FLAG]
    for encoding in ("utf-8", "gb18030"):
        try:
            for name in raw:
                name.decode(encoding)
        except UnicodeDecodeError:
            continue
        return encoding
    return "cp437"


def _raw_name(member: zipfile.ZipInfo) -> bytes:
    return member.orig_filename.encode("cp437")  # `zipfile` read them as cp437, which maps every byte


def _decoded_name(member: zipfile.ZipInfo, encoding: str) -> str:
    """Return the name with `/` between its parts; decoded first, since 0x5C may be half of a character in GBK."""
    name = member.orig_filename if member.flag_bits & _UTF8_FLAG else _raw_name(member).decode(encoding)
    return name.replace("\\", "/")


def _parts(name: str) -> List[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _refusal(member: zipfile.ZipInfo, name: str, parts: List[str], limits: Limits) -> Optional[str]:
    """Return why a member is left out, None if it is not."""
    kind = stat.S_IFMT(member.external_attr >> 16)
    checks = (
        ("absolute_path", name.startswith("/") or re.match(r"[A-Za-z]:", name) is not None),
        ("leaves_folder", ".." in parts),
        ("bad_name", not parts or re.search(r"[\x00-\x1f\x7f]", name) is not None),
        ("name_too_long", any(len(part.encode("utf-8", "replace")) > _MAX_NAME_BYTES - 16 for part in parts)),
        ("system_file", "__MACOSX" in parts or (bool(parts) and parts[-1] == ".DS_Store")),
        ("reserved_name", parts == [ACCOUNT_NAME]),
        ("link", kind == stat.S_IFLNK),
        ("no_plain_file", kind not in (0, stat.S_IFREG, stat.S_IFLNK)),
        ("encrypted", bool(member.flag_bits & _ENCRYPTED_FLAG)),
        ("nested_zip", name.lower().endswith(".zip")),
        ("compression_unknown", member.compress_type not in _COMPRESSIONS),
        ("bomb", member.file_size > max(_RATIO_FROM_BYTES, limits.ratio * member.compress_size)),
    )
    return next((reason for reason, holds in checks if holds), None)


def _free_name(path: str, taken: Dict[str, int]) -> str:
    """Return `path`, numbered if an earlier member has that name: `a.md`, `a (2).md`."""
    stem, dot, suffix = path.rpartition(".") if "." in path.rsplit("/", 1)[-1] else (path, "", "")
    free = path
    while free in taken:
        taken[path] += 1
        free = "%s (%d)%s%s" % (stem, taken[path], dot, suffix)
    taken[free] = 1
    return free


def _extract_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str) -> Optional[str]:
    """Write one member; return why it could not be read or written, None when it is whole."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except (FileExistsError, NotADirectoryError):
        return "name_conflict"  # a file stands where this member's folder belongs
    except (UnicodeEncodeError, OSError) as error:
        if getattr(error, "errno", None) in _FULL:
            raise
        return "unwritable_name"
    try:
        with os.fdopen(descriptor, "wb") as file, archive.open(member) as source:
            shutil.copyfileobj(source, file, 1024 * 1024)
    except (*_DAMAGED, OSError) as error:
        os.unlink(path)
        if getattr(error, "errno", None) in _FULL:
            raise
        return "damaged"
    return None


def _save_account(account: ArchiveAccount, folder: str) -> None:
    packed = {
        "kept": list(account.kept),
        "refused": [{"name": one.name, "reason": one.reason} for one in account.refused],
        "bytes": account.bytes,
    }
    descriptor = os.open(os.path.join(folder, ACCOUNT_NAME), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(packed, file, ensure_ascii=True, indent=1)


def _swap_in(partial_dir: str, target_dir: str) -> None:
    """Put the new folder where an earlier one may be; that one goes once the new one stands."""
    old_dir = target_dir.rstrip("/") + ".old"
    shutil.rmtree(old_dir, ignore_errors=True)
    if os.path.lexists(target_dir):
        os.rename(target_dir, old_dir)
    os.rename(partial_dir, target_dir)
    shutil.rmtree(old_dir, ignore_errors=True)
