"""The samples' file: written beside its place, moved there once every byte is on the disk. Side effects: writes it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from corpus_builder.private_file import partial_of
from corpus_builder.sample import Sample, format_sample


class SamplesFile:
    """The samples, written beside their place; all are on the disk when the block ends, and `place` moves them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = partial_of(path)
        self._digest = hashlib.sha256()

    def __enter__(self) -> SamplesFile:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._partial.unlink(missing_ok=True)
        self._file = os.fdopen(os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        return self

    def write(self, samples: Iterable[Sample]) -> None:
        """Append `samples`."""
        for sample in samples:
            line = (format_sample(sample) + "\n").encode("utf-8")
            self._digest.update(line)
            self._file.write(line)

    @property
    def sha256(self) -> str:
        """The digest of what was written so far."""
        return self._digest.hexdigest()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError:
                self.drop()
                raise
            self._file.close()
        else:
            self.drop()

    def place(self) -> None:
        """Put the file where it belongs."""
        os.replace(self._partial, self._path)

    def drop(self) -> None:
        """Remove what was written."""
        self._partial.unlink(missing_ok=True)  # first: closing writes what is left, and may fail on a full disk
        with suppress(OSError):
            self._file.close()
