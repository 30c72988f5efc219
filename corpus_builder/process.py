"""One task -> its file read and prepared, or what an earlier build made of it. Side effects: reads files, the cache."""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from corpus_builder.cache import Cache, FileKey, now_ns
from corpus_builder.collect import Task
from corpus_builder.entries import Summary
from corpus_builder.errors import ProjectError
from corpus_builder.prepare import Preparer
from corpus_builder.private_file import DISK_FULL
from corpus_builder.reading import InputFile, Reading, ReadingStream, dropped
from corpus_builder.text import Decoded, decode

_BLOCK_BYTES = 1024 * 1024
#: What says nothing of the file that is read: its text would be lost for the state of the machine.
NOT_OF_THE_FILE = (*DISK_FULL, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Prepared:
    """One file, done: its account, and where its samples lie (None: it has none)."""

    summary: Summary
    entry: Path | None


class Processor:
    """Takes tasks one by one."""

    def __init__(self, preparer: Preparer, cache: Cache) -> None:
        self._preparer = preparer
        self._cache = cache

    def process(self, task: Task) -> Prepared:
        """Return what a task's file gives; a file that is no text, or cannot be opened, is one dropped unit.

        Raises:
            OSError: the machine is at fault and not the file: its disk is full, say.
        """
        if task.path is None:
            return Prepared(_nothing(task, task.refusal), None)
        try:
            return self._opened(task, task.path)
        except OSError as error:
            if error.errno in NOT_OF_THE_FILE:
                raise
            return Prepared(_nothing(task, "unreadable"), None)

    def _opened(self, task: Task, path: Path) -> Prepared:
        """Take what was made of the same bytes, found by the file's look or by the bytes themselves; else make it."""
        looked_at_ns = now_ns()
        key, known_as = FileKey.of(os.stat(path)), f"{task.tag}\0{task.name}"
        content = self._cache.content_of(known_as, key)
        found = self._found(task, known_as, content) if content is not None else None
        if found is not None:
            return found
        data = None if task.open is not None else path.read_bytes()
        content = _digest_of(path) if data is None else hashlib.sha256(data).hexdigest()
        if FileKey.of(os.stat(path)) == key:
            self._cache.remember(known_as, key, content, looked_at_ns)
        found = self._found(task, known_as, content)
        if found is not None:
            return found
        entry = self._cache.entry_path(known_as, content, task.reader)
        return Prepared(self._streamed(task, path, entry) if data is None else self._made(task, data, entry), entry)

    def _found(self, task: Task, known_as: str, content: str) -> Prepared | None:
        entry = self._cache.entry_path(known_as, content, task.reader)
        summary = self._cache.find(entry)
        return None if summary is None else Prepared(summary, entry)

    def _made(self, task: Task, data: bytes, entry: Path) -> Summary:
        assert task.read is not None
        decoded = Decoded("", "none")
        try:
            decoded = decode(data, path=task.name)
            reading = task.read(decoded.text, task.name)
        except ProjectError as error:
            if error.code != "text_unreadable":
                raise
            reading = dropped("not_text")
        file = InputFile(
            name=task.name,
            sample_class=task.sample_class,
            bytes=len(data),
            encoding=decoded.encoding,
            is_guessed=decoded.is_guessed,
            broken_bytes=decoded.broken_bytes,
        )
        if decoded.nul_characters:
            reading = replace(reading, notes={**reading.notes, "nul_characters": decoded.nul_characters})
        return self._written(file, reading, decoded.text, entry)

    def _streamed(self, task: Task, path: Path, entry: Path) -> Summary:
        """Read a file piece by piece; it is never in memory as a whole."""
        assert task.open is not None
        unread = InputFile(name=task.name, sample_class=task.sample_class, bytes=os.path.getsize(path), encoding="none")
        try:
            export = task.open(path, task.name)
        except ProjectError as error:
            if error.code != "text_unreadable":
                raise
            return self._written(unread, dropped("not_text"), "", entry)
        with closing(export):
            file = replace(unread, encoding=export.encoding, is_guessed=export.is_guessed)
            return self._written(file, export.reading, "", entry)

    def _written(self, file: InputFile, reading: Reading | ReadingStream, text: str, entry: Path) -> Summary:
        with self._cache.writer(entry, file.name) as writer:
            summary = self._preparer.prepare(file, reading, text, writer)
            writer.finish(summary)
        return summary


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _nothing(task: Task, reason: str) -> Summary:
    """Return the account of a file that was never opened."""
    file = InputFile(name=task.name, sample_class=task.sample_class, bytes=0, encoding="none")
    return Summary(file=file, units_read=1, units_kept=0, samples=0, lost_tokens=0, drops={reason: 1})
