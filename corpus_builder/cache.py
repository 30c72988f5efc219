"""What earlier builds made of each file, kept beside the samples: only what changed is read again.

A file is known by size, times and inode; where those differ, by its bytes. What was made of it is known by those
bytes, its name, the plan's keys that matter, the tokenizer and our own code. Side effects: reads and writes the
folder, whose content nobody needs: what is missing or damaged is made again.

    .cache/  index.jsonl   9f3a….jsonl (an entry a file)   sketches.bin   built.json
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from corpus_builder.entries import EntryWriter, Summary, load_summary
from corpus_builder.private_file import gone_on_failure, partial_of

#: A file that changed this short before it was looked at may change again without a new time: its bytes decide.
TICK_NS = 100_000_000  # ten times the tick of Linux' file times
_INDEX = "index.jsonl"


def cache_dir(samples: Path) -> Path:
    """Return the folder of the cache for a samples file."""
    return samples.parent / ".cache"


@lru_cache(maxsize=1)
def builder_digest() -> str:
    """Return the digest of the builder's own code: another version makes everything again."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def digest_of(values: Any) -> str:
    """Return the sha256 of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class FileKey:
    """How a file is recognised without reading it."""

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileKey:
        return cls(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


@dataclass(slots=True)
class Cache:
    """The cache of one build.

    Attributes:
        folder: Where it lies.
        settings: Digest of all that matters to every file.
        made: Names of the files that had to be read and prepared, in order.
    """

    folder: Path
    settings: str
    made: list[str] = field(default_factory=list)
    _known: dict[str, list[Any]] = field(default_factory=dict)
    _seen: dict[str, list[Any]] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._known = _load_index(self.folder / _INDEX)

    def content_of(self, name: str, key: FileKey) -> str | None:
        """Return the digest of a file's bytes if they are known without reading it."""
        known = self._known.get(name)
        is_known = known is not None and known[:4] == [key.size, key.mtime_ns, key.inode, key.ctime_ns]
        if known is None or not is_known:
            return None
        self._seen[name] = known
        return str(known[4])

    def remember(self, name: str, key: FileKey, content: str, looked_at_ns: int) -> None:
        """Remember the bytes' digest of a file; not of one that changed a moment ago, since it may change again."""
        if max(key.mtime_ns, key.ctime_ns) < looked_at_ns - TICK_NS:
            self._seen[name] = [key.size, key.mtime_ns, key.inode, key.ctime_ns, content]

    def entry_path(self, name: str, content: str, reader: Mapping[str, Any]) -> Path:
        """Return where the entry of a file lies: its name follows from all that it depends on."""
        stem = digest_of([self.settings, name, content, reader])[:32]
        self._used.add(stem)
        return self.folder / f"{stem}.jsonl"

    def find(self, entry: Path) -> Summary | None:
        """Return the summary of an entry that is whole."""
        return load_summary(entry)

    def writer(self, entry: Path, name: str) -> EntryWriter:
        """Return the writer of an entry that is to be made."""
        self.made.append(name)
        return EntryWriter(entry)

    def save(self) -> None:
        """Write the index, and delete what this build did not use."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = json.dumps(self._seen, ensure_ascii=True)
        partial = partial_of(self.folder / _INDEX)
        with gone_on_failure(partial):
            partial.write_text(f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}\n", "utf-8")
        os.replace(partial, self.folder / _INDEX)
        for path in self.folder.glob("*.jsonl*"):
            if path.name != _INDEX and path.name.removesuffix(".jsonl") not in self._used:
                path.unlink(missing_ok=True)


def _load_index(path: Path) -> dict[str, list[Any]]:
    try:
        digest, _, content = path.read_text("utf-8").rstrip("\n").partition("\n")
        if hashlib.sha256(content.encode()).hexdigest() != digest:
            return {}
        index: dict[str, list[Any]] = json.loads(content)
        return index
    except (OSError, ValueError):
        return {}


def now_ns() -> int:
    """Return the time that files are stamped with."""
    return time.time_ns()
