"""A ZIP of 10,000 small dialogs, extracted with names, limits and hashes checked, against `unzip` (target 1.5)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.generated import Writer
from benchmarks.measure import Claim, best_wall_of, report
from corpus_builder.archive import extract_archive

MEMBERS = 10_000


def write_zip(path: Path) -> int:
    """Write the archive and return the bytes of its members."""
    writer = Writer(4)
    size = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(MEMBERS):
            text = writer.dialog(3).encode()
            size += len(text)
            archive.writestr(f"对话/{number // 100:03d}/{number:05d}.md", text)
    return size


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        path, ours, theirs = (Path(scratch, name) for name in ("dialogs.zip", "ours", "theirs"))
        size = write_zip(path)

        def extract() -> None:
            extract_archive(str(path), str(ours))

        def unzip() -> None:
            subprocess.run(["unzip", "-q", str(path), "-d", str(theirs)], check=True)

        found = {"ours": float("inf"), "unzip": float("inf")}
        for at in range(6):  # whoever comes first works while the disk is busy with what was deleted: they take turns
            sides = [("ours", ours, extract), ("unzip", theirs, unzip)]
            for name, folder, action in sides if at % 2 else reversed(sides):
                shutil.rmtree(folder, ignore_errors=True)
                os.sync()
                seconds = best_wall_of({name: action}, rounds=1)[name]
                found[name] = min(found[name], seconds)
        counts = [sum(1 for file in folder.rglob("*.md")) for folder in (ours, theirs)]
        assert counts == [MEMBERS, MEMBERS], counts
    return report(
        "archive",
        about=(__doc__ or "").strip(),
        packages=(),
        claims=[Claim("our time, of unzip's", found["ours"] / found["unzip"], 1.5, at_most=True)],
        numbers=[
            ("archive", f"{MEMBERS} members, {size / 1e6:.0f} MB"),
            *((name, f"{seconds:.2f} s") for name, seconds in found.items()),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
