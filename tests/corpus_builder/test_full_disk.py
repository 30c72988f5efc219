"""A disk that fills up at any point of a build: the corpus that was there stays, to the byte, and no file is lost."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from corpus_builder.build import main
from corpus_builder.errors import parse_error_line
from corpus_builder.manifest import load_manifest

pytestmark = pytest.mark.e2e  # a hundred builds
PAGE = 4096


@pytest.fixture
def disk(world) -> Iterator[Path]:
    """Where the corpus lies: a file system of three megabytes."""
    world.out.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", str(world.out)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no small disk to fill: mounting a tmpfs takes root and `mount`")
    yield world.out
    subprocess.run(["umount", "-l", str(world.out)], check=True)


def leave_free(disk: Path, pages: int) -> Path:
    """Fill the disk but for so many pages; return the file that does it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        file.write(bytes(max(0, shutil.disk_usage(disk).free - pages * PAGE)))
    return filler


def corpus(disk: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in disk.iterdir() if path.is_file()}


def test_a_disk_that_fills_up_anywhere_leaves_the_corpus_that_was_there(world, disk, capsys):
    large = "".join(f"## Night {night}\n\n{'The lamp burns, and the sea is calm. ' * 40}\n\n" for night in range(80))
    (world.sources / "docs/a.md").write_text(large)  # without it, there would be room
    assert main([str(world(max_seq_len=300))]) == 0
    before, drops = corpus(disk), [file.drops for file in load_manifest(disk / "manifest").files]
    capsys.readouterr()
    failed_at: list[int] = []
    for pages in range(0, 700, 7):
        filler = leave_free(disk, pages)
        code = main([str(world(max_seq_len=301))])
        said = capsys.readouterr().err.strip()
        filler.unlink()
        if code == 0:
            break
        failed_at.append(pages)
        error = parse_error_line(said)
        assert (code, error.code, error.values["path"]) == (4, "box_disk_full", str(disk)), said
        assert error.values["needed_gib"] > error.values["free_gib"]
        assert list(disk.rglob("*.partial")) == []
        if load_manifest(disk / "manifest").max_seq_len == 301:
            continue  # the corpus was whole, and there was no room for what makes the next build fast
        assert corpus(disk) == before, f"{pages} free pages"
    assert len(failed_at) > 5
    manifest = load_manifest(disk / "manifest")
    assert manifest.max_seq_len == 301
    assert [file.drops for file in manifest.files] == drops, "a file was dropped for want of room"
