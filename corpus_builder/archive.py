"""A dialog ZIP -> a folder: every member is in it, or refused by name with a reason.

Runs on the box too: standard library and Python 3.8 only. Side effects: writes `target_dir` (by rename, never
merged) with an account beside the members. ZIPs in the ZIP become folders of their name:

    .zy-archive.json   {"kept": ["a.md", "more.zip/b.md"], "refused": [{"name": "../c.md", "reason": "leaves_folder"}],
                        "bytes": 12, "limits": {"members": 100000, …}}
"""

import contextlib
import errno
import json
import lzma
import os
import re
import shutil
import struct
import zipfile
import zlib
from dataclasses import asdict, dataclass
from typing import Dict, Iterator, List, Optional, Set, Tuple

from corpus_builder.archive_limits import USUAL_LIMITS, Limits
from corpus_builder.archive_members import RATIO_FROM_BYTES, Member, open_zip, read_members
from corpus_builder.errors import ProjectError

ACCOUNT_NAME = ".zy-archive.json"
#: Reasons that other limits may take away. `nested_zip`: archives of the first version, which opened none.
LIMIT_REASONS = frozenset({"bomb", "beyond_limits", "nested_too_deep", "nested_zip"})
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
#: What `zipfile` and its decompressors raise over damaged bytes.
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, struct.error,
    ValueError, OverflowError, IndexError,
)  # fmt: skip
_CHUNK_BYTES = 1024 * 1024


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
    limits: Optional[Limits] = None

    def holds_under(self, limits: Limits) -> bool:
        """Whether extracting again under `limits` would give the same."""
        return self.limits == limits or not any(one.reason in LIMIT_REASONS for one in self.refused)


def extract_archive(zip_path: str, target_dir: str, *, limits: Limits = USUAL_LIMITS) -> ArchiveAccount:
    """Extract the ZIP into `target_dir`, which is whole when it appears, and return the account.

    Raises:
        ProjectError: `dialog_zip_missing`, `dialog_zip_unreadable`, `dialog_zip_not_zip`, `archive_refused`,
            `box_disk_full`.
    """
    head = _head(zip_path)
    partial_dir = target_dir.rstrip("/") + ".partial"
    shutil.rmtree(partial_dir, ignore_errors=True)
    extraction = _Extraction(partial_dir, limits)
    try:
        excess = extraction.add_zip(zip_path)
        if excess is not None:
            raise ProjectError("archive_refused", path=zip_path, reason=excess)
        account = extraction.account()
        _save_account(account, partial_dir)
        _swap_in(partial_dir, target_dir)
    except _DAMAGED as error:
        if head.startswith(b"PK"):
            raise ProjectError("dialog_zip_unreadable", path=zip_path, reason=_short(error)) from error
        raise ProjectError("dialog_zip_not_zip", path=zip_path, looks_like=looks_like(head)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _disk_full(target_dir, extraction.declared_bytes) from error
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)
    return account


def _head(zip_path: str) -> bytes:
    if not os.path.isfile(zip_path):
        raise ProjectError("dialog_zip_missing", path=zip_path)
    try:
        with open(zip_path, "rb") as file:
            return file.read(512)
    except OSError as error:
        raise ProjectError("dialog_zip_unreadable", path=zip_path, reason=_short(error)) from error


def _short(error: BaseException) -> str:
    """Only the kind of a failure: its words may hold a member's name."""
    return type(error).__name__


def _disk_full(target_dir: str, needed: int) -> ProjectError:
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(target_dir))).free
    return ProjectError(
        "box_disk_full", path=target_dir, free_gib=round(free / 1024**3, 1), needed_gib=round(needed / 1024**3, 1)
    )


def load_account(folder: str) -> Optional[ArchiveAccount]:
    """Return the account of an extracted archive; None where the folder did not come from one."""
    try:
        with open(os.path.join(folder, ACCOUNT_NAME), encoding="utf-8") as file:
            packed = json.load(file)
        refused = tuple(Refused(one["name"], one["reason"]) for one in packed["refused"])
        limits = Limits(**packed["limits"]) if packed.get("limits") else None
        return ArchiveAccount(tuple(packed["kept"]), refused, packed["bytes"], limits)
    except (OSError, ValueError, KeyError, TypeError):
        return None


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


class _Extraction:
    """Writes the members of a ZIP, and of the ZIPs in it, below one folder; the limits are shared by all of them."""

    def __init__(self, folder: str, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._kept: List[str] = []
        self._refused: List[Refused] = []
        self._taken: Dict[str, int] = {}
        self._folders: Set[str] = set()
        self._members = 0
        self._bytes = 0
        self.declared_bytes = 0

    def account(self) -> ArchiveAccount:
        """Return what became of each member so far."""
        return ArchiveAccount(tuple(self._kept), tuple(self._refused), self._bytes, self._limits)

    def add_zip(self, zip_path: str, prefix: str = "", depth: int = 0) -> Optional[str]:
        """Extract one ZIP below `prefix`; return why nothing of it was taken, None when its members were."""
        with open_zip(zip_path) as archive:
            members = read_members(archive, max_ratio=self._limits.ratio, reserved=ACCOUNT_NAME)
            excess = self._excess(members, os.path.getsize(zip_path))
            if excess is not None:
                return excess
            self._make_folder(self._folder)
            for member in members:
                reason = member.reason or self._add(archive, member, prefix, depth)
                if reason is not None:
                    self._refused.append(Refused(prefix + member.name, reason))
        return None

    def _excess(self, members: List[Member], zip_bytes: int) -> Optional[str]:
        """Return which limit the members go over, None if they don't; what is refused anyway weighs nothing."""
        limits = self._limits
        count = self._members + len(members)
        own_bytes = sum(member.info.file_size for member in members if member.reason is None)
        total = self.declared_bytes + own_bytes
        if count > limits.members:
            return "reason.limit_members: %d > %d" % (count, limits.members)
        if total > limits.total_bytes:
            return "reason.limit_bytes: %d > %d" % (total, limits.total_bytes)
        if own_bytes > max(RATIO_FROM_BYTES, limits.ratio * zip_bytes):  # members that share their bytes
            return "reason.limit_ratio: %d > %d" % (own_bytes // max(1, zip_bytes), limits.ratio)
        self._members, self.declared_bytes = count, total
        return None

    def _add(self, archive: zipfile.ZipFile, member: Member, prefix: str, depth: int) -> Optional[str]:
        if member.is_zip:
            return self._add_nested(archive, member, prefix, depth)
        path = _free_name(prefix + "/".join(member.parts), self._taken)
        reason = self._write(archive, member, os.path.join(self._folder, *path.split("/")))
        if reason is None:
            self._kept.append(path)
            self._bytes += member.info.file_size
        return reason

    def _add_nested(self, archive: zipfile.ZipFile, member: Member, prefix: str, depth: int) -> Optional[str]:
        if depth >= self._limits.depth:
            return "nested_too_deep"
        nested = os.path.join(self._folder, "%s.%d" % (ACCOUNT_NAME, depth + 1))
        reason = self._write(archive, member, nested)
        if reason is not None:
            return reason
        try:
            excess = self.add_zip(nested, prefix + "/".join(member.parts) + "/", depth + 1)
        except _DAMAGED:
            return "damaged"
        finally:
            os.unlink(nested)
        return None if excess is None else "beyond_limits"

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._folders.add(folder)

    def _write(self, archive: zipfile.ZipFile, member: Member, path: str) -> Optional[str]:
        """Write one member; return why it could not be read or written, None when it is whole."""
        try:
            self._make_folder(os.path.dirname(path))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except (FileExistsError, NotADirectoryError):
            return "name_conflict"  # a file stands where this member's folder belongs
        except (UnicodeEncodeError, OSError) as error:
            if getattr(error, "errno", None) in _FULL:
                raise
            return "unwritable_name"
        try:
            with _closing(descriptor), archive.open(member.info) as source:
                while data := source.read(_CHUNK_BYTES):
                    _write_all(descriptor, data)
        except (*_DAMAGED, OSError) as error:
            os.unlink(path)
            if getattr(error, "errno", None) in _FULL:
                raise
            return "damaged"
        return None


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _free_name(path: str, taken: Dict[str, int]) -> str:
    """Return `path`, numbered if an earlier member has that name: `a.md`, `a (2).md`."""
    stem, dot, suffix = path.rpartition(".") if "." in path.rsplit("/", 1)[-1] else (path, "", "")
    free = path
    while free in taken:
        taken[path] += 1
        free = "%s (%d)%s%s" % (stem, taken[path], dot, suffix)
    taken[free] = 1
    return free


def _save_account(account: ArchiveAccount, folder: str) -> None:
    packed = {
        "kept": list(account.kept),
        "refused": [{"name": one.name, "reason": one.reason} for one in account.refused],
        "bytes": account.bytes,
        "limits": asdict(account.limits) if account.limits else None,
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
