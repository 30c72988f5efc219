"""A large file in parts: several connections fetch blocks, a cut costs what it cut, the hash follows what is whole.

Runs on the box: standard library and Python 3.8 only. Side effects: network, files, threads. Beside the partial file
lies what it is part of and which of its blocks are whole, each with its checksum. A record that does not fit the
object, or cannot be read, counts for nothing; a block that differs from its checksum is fetched again. So a torn
record, or blocks that a power cut took back, never make a wrong file:

    dialog.zip.partial.json   {"source": "<digest of scheme, host and path>", "etag": "\\"9be0…\\"", "size": 20000000,
                               "block_bytes": 8388608, "crc32": {"0": 3421780262, "2": 917465}}
"""

import hashlib
import http.client
import json
import os
import re
import ssl
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

from controller.boxside.addresses import Caller
from controller.boxside.links import Cut, Link, check_head, refusal_of
from controller.boxside.space import check_space, disk_error
from controller.boxside.work import read_json
from corpus_builder.errors import ProjectError

BLOCK_BYTES = 8 << 20  # S3's and COS's own parts are of this order; a lost process costs at most one per stream
MAX_STREAMS = 4
MAX_IN_A_ROW = 8  # blocks that one request asks for: between two requests a stream waits for a round trip
#: Tries in a row without one new byte; the pauses between them double from a second.
MAX_TRIES = 5
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "zyforge"}
_READ_BYTES = 256 * 1024
_HASH_BYTES = 1 << 20
_TELL_EVERY_S = 30.0
_CRC = "crc32"


class Changed(Exception):
    """The storage has another object by now, or does not give parts of it after all."""


@dataclass
class Block:
    """`got` bytes of it are in the file, `crc32` is theirs. One worker at a time writes to it."""

    index: int
    begin: int
    size: int
    got: int = 0
    crc32: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there."""
        return self.got == self.size


class Tries:
    """Patience with one connection: failures in a row, and the pause before the next try."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep
        self._count = 0

    def wait_for_another(self, error: Exception, *, has_new_bytes: bool) -> bool:
        """Return True after a pause, False at once where another try is not worth it."""
        self._count = 1 if has_new_bytes else self._count + 1
        if isinstance(error, ssl.SSLCertVerificationError) or self._count >= MAX_TRIES:
            return False  # no later try finds another certificate
        self._sleep(2.0 ** (self._count - 1))
        return True

    def forgive(self) -> None:
        """Forget the failures: what was asked for has come."""
        self._count = 0


def failure_of(link: Link, error: Exception) -> ProjectError:
    """Return the failure that is left when no try is."""
    reason = str(error) if isinstance(error, Cut) else type(error).__name__
    return ProjectError("storage_failed", source=link.shown, reason=reason)


class PartFile:
    """The file as far as it is there, in blocks; what an earlier process left is taken up.

    Raises:
        ProjectError: `box_disk_full` before the first byte; `box_not_writable`.
    """

    def __init__(self, path: str, link: Link, *, etag: str, size: int) -> None:
        self.path = path
        self.size = size
        self.blocks = [
            Block(index, begin, min(BLOCK_BYTES, size - begin))
            for index, begin in enumerate(range(0, size, BLOCK_BYTES))
        ]
        self._record = path + ".json"
        self._about = {"source": link.source, "etag": etag, "size": size, "block_bytes": BLOCK_BYTES}
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise disk_error(path, error, needed_bytes=size) from error
        try:
            self._take_up()
            check_space(path, missing_bytes=size - self.got, whole_bytes=size)
        except BaseException:
            self.close()
            raise

    @property
    def got(self) -> int:
        """How many bytes are there."""
        return sum(block.got for block in self.blocks)

    def _take_up(self) -> None:
        """Count the blocks that the record names and whose bytes are those."""
        buffer = memoryview(bytearray(_HASH_BYTES))
        for index, crc32 in self._recorded().items():
            block = self.blocks[index]
            while block.got < block.size:
                count = os.preadv(self._fd, [buffer[: block.size - block.got]], block.begin + block.got)
                if not count:
                    break
                block.crc32 = zlib.crc32(buffer[:count], block.crc32)
                block.got += count
            if not block.is_whole or block.crc32 != crc32:
                block.got = block.crc32 = 0
        os.ftruncate(self._fd, self.size if self.got else 0)

    def _recorded(self) -> Dict[int, int]:
        about = read_json(self._record) or {}
        if {name: about.get(name) for name in self._about} != self._about:
            return {}
        try:
            found = {int(index): int(crc32) for index, crc32 in about[_CRC].items()}
        except (KeyError, AttributeError, TypeError, ValueError):
            return {}
        return {index: crc32 for index, crc32 in found.items() if 0 <= index < len(self.blocks)}

    def write(self, block: Block, data: bytes) -> bool:
        """Add what has come to a block; return whether it is whole now."""
        try:
            write_whole(self._fd, data, block.begin + block.got)
        except OSError as error:
            raise disk_error(self.path, error, needed_bytes=self.size - self.got) from error
        block.crc32 = zlib.crc32(data, block.crc32)
        block.got += len(data)
        return block.is_whole

    def read(self, buffer: memoryview, begin: int) -> int:
        """Fill `buffer` from `begin` on; return how many bytes there were."""
        return os.preadv(self._fd, [buffer], begin)

    def save_record(self) -> None:
        """Write down which blocks are whole, by rename; their checksums say whether that is still so later."""
        whole = {str(block.index): block.crc32 for block in self.blocks if block.is_whole}
        partial = self._record + ".partial"
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(dict(self._about, **{_CRC: whole}), file)
            os.replace(partial, self._record)
        except OSError as error:
            raise disk_error(self.path, error, needed_bytes=self.size - self.got) from error

    def finish(self) -> None:
        """Forget what the whole file was part of."""
        forget(self.path, and_file=False)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


def write_whole(fd: int, data: bytes, begin: int) -> None:
    """Write all of `data` at `begin`; a disk that fills up takes a part first, and refuses only the rest."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, begin)
        view, begin = view[count:], begin + count


def forget(path: str, *, and_file: bool) -> None:
    """Remove the record of a partial file, and the file itself."""
    for name in (path + ".json", path + ".json.partial") + ((path,) if and_file else ()):
        if os.path.exists(name):
            os.unlink(name)


class PartsDownload:
    """Fetches the blocks that are missing. The calling thread hashes; each stream has a thread of its own."""

    def __init__(
        self, link: Link, file: PartFile, etag: str, *, say: Callable[[str], None], sleep: Callable[[float], None]
    ) -> None:
        self._link = link
        self._file = file
        self._etag = etag
        self._say = say
        self._sleep = sleep
        self._news = threading.Condition()
        self._missing = [block for block in file.blocks if not block.is_whole]
        self._at_work = 0
        self._failure: Optional[BaseException] = None  # of any stream: it ends all of them
        self._last_cut: Optional[Exception] = None

    def run(self, first: Caller) -> str:
        """Return the sha256 of the whole file; `first` is a connection that is open already.

        Raises:
            ProjectError: what the storage or the disk said; `storage_failed` when every stream has given up.
            Changed: the object is another one now.
        """
        count = min(MAX_STREAMS, len(self._missing))
        callers = [first] + [Caller(self._link.url, self._link.allow) for _ in range(count - 1)]
        threads = [threading.Thread(target=self._work, args=(one,), daemon=True) for one in callers[:count]]
        self._at_work = len(threads)
        try:
            for thread in threads:
                thread.start()
            return self._hash()
        finally:
            with self._news:
                self._failure = self._failure or Cut("ended")
            while any(thread.is_alive() for thread in threads):
                for caller in callers:
                    caller.abort()
                for thread in threads:
                    thread.join(0.05)

    def _hash(self) -> str:
        """Hash the file as it grows from its beginning, and return when all of it is hashed."""
        sha256, buffer, done, told = hashlib.sha256(), memoryview(bytearray(_HASH_BYTES)), 0, time.monotonic()
        blocks = iter(self._file.blocks)
        block = next(blocks, None)
        while block is not None:
            with self._news:
                while self._failure is None and self._at_work and block.begin + block.got <= done:
                    self._news.wait(_TELL_EVERY_S)
                    told = self._tell(told)
                if self._failure is not None:
                    raise self._failure
            if block.begin + block.got <= done:  # every stream has given up
                raise failure_of(self._link, self._last_cut or Cut("no stream")) from self._last_cut
            while done < block.begin + block.got:
                count = self._file.read(buffer[: block.begin + block.got - done], done)
                if not count:
                    raise ProjectError("box_not_writable", path=self._file.path, reason="the file was cut short")
                sha256.update(buffer[:count])
                done += count
            if block.is_whole and done == block.begin + block.size:
                block = next(blocks, None)
        return sha256.hexdigest()

    def _tell(self, told: float) -> float:
        if time.monotonic() < told + _TELL_EVERY_S:
            return told
        self._say("%d of %d bytes are here" % (self._file.got, self._file.size))
        return time.monotonic()

    def _work(self, caller: Caller) -> None:
        """Fetch missing blocks, some in a row at a time; a cut gives them back, to whoever comes first."""
        tries = Tries(self._sleep)
        try:
            while True:
                blocks = self._take()
                if not blocks:
                    return
                before = sum(block.got for block in blocks)
                try:
                    self._fetch(caller, blocks)
                except (OSError, http.client.HTTPException, Cut) as error:
                    self._give_back(blocks, error)
                    if self._failure is not None:
                        return
                    self._say("cut after %d bytes; trying again" % self._file.got)
                    if not tries.wait_for_another(error, has_new_bytes=sum(block.got for block in blocks) > before):
                        return
                else:
                    tries.forgive()
        except BaseException as error:
            with self._news:
                self._failure = self._failure or error
        finally:
            caller.close()
            with self._news:
                self._at_work -= 1
                self._news.notify_all()

    def _take(self) -> List[Block]:
        """Return missing blocks in a row for one request: many while many are missing, one by one towards the end."""
        with self._news:
            if not self._missing or self._failure is not None:
                return []
            most = max(1, min(MAX_IN_A_ROW, len(self._missing) // (2 * MAX_STREAMS)))
            blocks = [self._missing.pop(0)]
            while len(blocks) < most and self._missing[0].index == blocks[-1].index + 1 and not self._missing[0].got:
                blocks.append(self._missing.pop(0))
            return blocks

    def _give_back(self, blocks: List[Block], error: Exception) -> None:
        with self._news:
            self._missing.extend(block for block in blocks if not block.is_whole)
            self._missing.sort(key=lambda one: one.index)
            self._last_cut = error

    def _fetch(self, caller: Caller, blocks: List[Block]) -> None:
        """Fetch the rest of blocks in a row; raise Cut where less came."""
        begin, end = blocks[0].begin + blocks[0].got, blocks[-1].begin + blocks[-1].size - 1
        headers = dict(HEADERS, Range="bytes=%d-%d" % (begin, end))
        headers["If-Range"] = self._etag
        with caller.get(headers) as response:
            left = self._check(response, begin, end)
            for block in blocks:
                left = self._read(response, block, left)
            if not left:
                response.close()  # all of it is read: the connection is good for the next question
        if not blocks[-1].is_whole:
            raise Cut("the storage sent less than was asked for")

    def _read(self, response: http.client.HTTPResponse, block: Block, left: int) -> int:
        """Take what an answer of `left` more bytes brings of a block; return what is left then."""
        while left and not block.is_whole:
            data = response.read1(min(_READ_BYTES, left, block.size - block.got))
            if self._failure is not None:
                raise Cut("ended")
            if not data:
                raise Cut("the connection was cut")
            if block.begin == block.got == 0:
                check_head(self._link, response, data[:4096])
            is_whole = self._file.write(block, data)
            left -= len(data)
            with self._news:
                if is_whole:
                    self._file.save_record()
                self._news.notify_all()
        return left

    def _check(self, response: http.client.HTTPResponse, begin: int, end: int) -> int:
        """Return how many bytes the answer brings; raise unless they are those that were asked for."""
        if response.status in (200, 412, 416):
            raise Changed
        if response.status != 206:
            raise refusal_of(self._link, response)
        match = re.match(r"bytes (\d+)-(\d+)/(\d+)$", response.getheader("Content-Range") or "")
        if match is None or response.getheader("ETag") != self._etag:
            raise Changed
        first, last, total = (int(text) for text in match.groups())
        if (first, total) != (begin, self._file.size) or not begin <= last <= end:
            raise Changed
        return last - first + 1
