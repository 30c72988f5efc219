"""The members of a ZIP: what they are called, in whatever encoding, and which of them are left out and why.

Runs on the box too: standard library and Python 3.8 only. Side effects: `open_zip` opens the file.

A name is, in this order: the Unicode path beside it (Info-ZIP's extra field 0x7075), UTF-8 where the member says so,
and else text in one encoding for the whole archive. It is decoded before anything looks for `\\` or `/` in it: 0x5C
is the second half of characters of GBK, Big5 and Shift-JIS (乗 in GBK is 81 5C).
"""

import contextlib
import io
import re
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence

from corpus_builder.legacy_encodings import EAST_ASIAN, rank_encodings

ZIP_SUFFIX = ".zip"
UTF8_FLAG = 0x800
#: Encrypted, strongly encrypted, encrypted directory. APPNOTE 4.4.4.
_ENCRYPTED_FLAGS = 0x1 | 0x40 | 0x2000
_AES = 99  # WinZip's AES stands where the compression belongs
_DEFLATE64 = 9
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}
#: Small members may be compressed by any ratio: a page of blanks is no bomb.
RATIO_FROM_BYTES = 1024 * 1024
_MAX_NAME_BYTES = 255 - 16  # NAME_MAX of Linux file systems, and room for a number
_UNICODE_PATH = 0x7075
_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_DIRECTORY_ENTRY = b"PK\x01\x02"
_DIRECTORY_ENTRY_BYTES = 46


@dataclass(frozen=True)
class Member:
    """One file of an archive: its readable name with `/` between its parts, and why it is left out, if it is."""

    info: zipfile.ZipInfo
    name: str
    reason: Optional[str] = None

    @property
    def parts(self) -> List[str]:
        """The folders and the file of the name."""
        return [part for part in self.name.split("/") if part not in ("", ".")]

    @property
    def is_zip(self) -> bool:
        """Whether the member is an archive of its own."""
        return self.name.lower().endswith(ZIP_SUFFIX)


@contextlib.contextmanager
def open_zip(path: str) -> Iterator[zipfile.ZipFile]:
    """Yield the archive, also where its names are not the UTF-8 that they say they are."""
    with contextlib.ExitStack() as stack:
        try:
            archive = zipfile.ZipFile(path)
        except UnicodeDecodeError:
            file = stack.enter_context(_WithoutUtf8Flags(io.FileIO(path)))
            archive = zipfile.ZipFile(file)
            file.is_directory_read = True
        except OSError as error:  # an offset that leads nowhere
            raise zipfile.BadZipFile(type(error).__name__) from error
        yield stack.enter_context(archive)


class _WithoutUtf8Flags(io.BufferedReader):
    """A ZIP whose directory is read as if no name claimed to be UTF-8; all else as it stands."""

    is_directory_read = False

    def read(self, size: Optional[int] = -1) -> bytes:
        """Return the next bytes."""
        data = super().read(size)
        if self.is_directory_read or not data.startswith(_DIRECTORY_ENTRY):
            return data
        entries, at = bytearray(data), 0
        while entries[at : at + 4] == _DIRECTORY_ENTRY and at + _DIRECTORY_ENTRY_BYTES <= len(entries):
            entries[at + 9] &= ~(UTF8_FLAG >> 8) & 0xFF
            at += _DIRECTORY_ENTRY_BYTES + sum(struct.unpack_from("<3H", entries, at + 28))
        return bytes(entries)


def read_members(archive: zipfile.ZipFile, *, max_ratio: int, reserved: str) -> List[Member]:
    """Return the files of an archive in its order, those that are left out with their reason."""
    infos = archive.infolist()
    encoding = _name_encoding(infos)
    found = [Member(info, _decoded_name(info, encoding)) for info in infos]
    return [
        Member(member.info, member.name, _refusal(member, max_ratio, reserved))
        for member in found
        if not member.name.endswith("/")
    ]


def _name_encoding(infos: Sequence[zipfile.ZipInfo]) -> str:
    """Return the encoding of the names without the UTF-8 flag: one for the whole archive."""
    names = b"\n".join(_raw_name(info) for info in infos if not info.flag_bits & UTF8_FLAG)
    try:
        names.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        return rank_encodings(names, (*EAST_ASIAN, "cp437"))[0][0]


def _raw_name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("cp437")  # `zipfile` read them as cp437, which maps every byte


def _decoded_name(info: zipfile.ZipInfo, encoding: str) -> str:
    if info.flag_bits & UTF8_FLAG:
        return info.orig_filename.replace("\\", "/")
    raw = _raw_name(info)
    name = _unicode_path(info.extra, raw)
    if name is None:
        try:
            name = raw.decode("utf-8")  # also where other names of the archive are not
        except UnicodeDecodeError:
            name = raw.decode(encoding)
    return name.replace("\\", "/")


def _unicode_path(extra: bytes, raw: bytes) -> Optional[str]:
    """Return the name in the extra field 0x7075 if it belongs to this name: version 1, CRC of the name, UTF-8."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        field = extra[at + 4 : at + 4 + size]
        if kind == _UNICODE_PATH and len(field) > 5 and field[0] == 1:
            try:
                name = field[5:].decode("utf-8")
            except UnicodeDecodeError:
                return None
            return name if struct.unpack_from("<I", field, 1)[0] == zlib.crc32(raw) else None
        at += 4 + size
    return None


def _refusal(member: Member, max_ratio: int, reserved: str) -> Optional[str]:
    """Return why a member is left out, None if it is not."""
    info, name, parts = member.info, member.name, member.parts
    kind = stat.S_IFMT(info.external_attr >> 16)
    checks = (
        ("absolute_path", name.startswith("/") or _DRIVE.match(name) is not None),
        ("leaves_folder", ".." in parts),
        ("bad_name", not parts or _CONTROLS.search(name) is not None),
        ("name_too_long", any(len(part.encode("utf-8", "replace")) > _MAX_NAME_BYTES for part in parts)),
        ("system_file", "__MACOSX" in parts or (bool(parts) and parts[-1] == ".DS_Store")),
        ("reserved_name", bool(parts) and parts[0].startswith(reserved)),
        ("link", kind == stat.S_IFLNK),
        ("no_plain_file", kind not in (0, stat.S_IFREG, stat.S_IFLNK)),
        ("encrypted", bool(info.flag_bits & _ENCRYPTED_FLAGS) or info.compress_type == _AES),
        ("deflate64", info.compress_type == _DEFLATE64),
        ("compression_unknown", info.compress_type not in _COMPRESSIONS),
        ("bomb", info.file_size > max(RATIO_FROM_BYTES, max_ratio * info.compress_size)),
    )
    return next((reason for reason, holds in checks if holds), None)
