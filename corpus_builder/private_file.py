"""Text -> a file that only its owner can read, whole when it appears. Side effects: writes it."""

from __future__ import annotations

import os
from pathlib import Path


def save_private(text: str, path: Path) -> None:
    """Write `text` to `path` by rename."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)
