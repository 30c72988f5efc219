"""A corpus build's lines -> a bar on a terminal, the same lines everywhere else. Side effects: writes to the stream.

On a terminal a file's line is shown only if something was noticed about it; the bar counts the others.

    [########------------]  41 %  12/29
"""

from __future__ import annotations

import re
from typing import TextIO

_TOTAL = re.compile(r"\[corpus\] (?P<count>\d+) file\(s\) to read$")
_FILE = re.compile(r"\[\w[\w-]*\] .*: \d+ unit\(s\) -> \d+ sample\(s\), [\w-]+(?P<noticed>, .*)?$")
_WIDTH = 20
_CLEAR = "\r\x1b[K"


class BuildBar:
    """Takes the lines of one build."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._total = self._done = 0

    def add(self, line: str) -> None:
        """Show one line, which has no newline."""
        if not self._is_terminal:
            self._stream.write(line + "\n")
            return
        total, file = _TOTAL.match(line), _FILE.match(line)
        self._total = int(total["count"]) if total else self._total
        self._done += file is not None
        self._stream.write(_CLEAR)
        if file is None or file["noticed"]:
            self._stream.write(line + "\n")
        if self._done < self._total:
            self._stream.write(self._bar())
        self._stream.flush()

    def end(self) -> None:
        """Take the bar away."""
        if self._is_terminal:
            self._stream.write(_CLEAR)

    def _bar(self) -> str:
        filled = _WIDTH * self._done // self._total
        share = 100 * self._done // self._total
        return f"[{'#' * filled}{'-' * (_WIDTH - filled)}] {share:3d} %  {self._done}/{self._total}"
