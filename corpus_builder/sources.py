"""Which files a plan's sources are: found in a fixed order, missing ones by name, never outside their root.

Side effects: reads folders and files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corpus_builder.errors import ProjectError
from corpus_builder.plan import SoulSource

DIALOG_SUFFIXES = (".md", ".markdown", ".txt")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file: where it lies, and its name in samples and accounts (relative to its root, readable)."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class SoulFiles:
    """The documents of one source. `listed` and `found` count the plan's paths (its patterns, if it has no paths)."""

    files: tuple[SourceFile, ...]
    missing: tuple[str, ...]
    listed: int
    found: int


def find_soul_files(root: Path, source: SoulSource) -> SoulFiles:
    """Return the documents that the plan names, paths first, then patterns, each file once.

    Raises:
        ProjectError: `source_link_leaves_root`, when a path or a link leads out of `root`.
    """
    by_path = {path: find_file(root, path) for path in source.paths}
    by_glob = {pattern: list(_matches(root, pattern)) for pattern in source.globs}
    found = [file for file in by_path.values() if file is not None]
    missing = [path for path, file in by_path.items() if file is None]
    missing += [pattern for pattern, files in by_glob.items() if not files]
    every = {file.name: file for file in [*found, *(file for files in by_glob.values() for file in files)]}
    if by_path:
        return SoulFiles(tuple(every.values()), tuple(missing), len(by_path), len(found))
    return SoulFiles(
        tuple(every.values()), tuple(missing), len(by_glob), sum(bool(files) for files in by_glob.values())
    )


def find_file(root: Path, name: str) -> SourceFile | None:
    """Return the file `name` under `root`, None if there is none; raise where the name leads out of `root`."""
    path = root / name
    _check_inside(root, path, name)
    return SourceFile(path, name) if path.is_file() else None


def _matches(root: Path, pattern: str) -> Iterator[SourceFile]:
    _check_pattern(pattern)
    for path in sorted(root.glob(pattern)):
        name = readable_name(path.relative_to(root))
        _check_inside(root, path, name)
        if path.is_file():
            yield SourceFile(path, name)


def _check_inside(root: Path, path: Path, name: str) -> None:
    real_root, real = os.path.realpath(root), os.path.realpath(path)
    if os.path.commonpath([real_root, real]) != real_root:
        raise ProjectError("source_link_leaves_root", path=name)


def readable_name(path: Path) -> str:
    """Return a path as text that can be written as UTF-8, whatever bytes its name is made of."""
    raw = os.fsencode(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        pass
    try:
        return raw.decode("gb18030")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace")


def find_dialog_files(root: Path) -> tuple[list[SourceFile], int]:
    """Return the dialogs under `root` by name, and how many files of other kinds lie there."""
    dialogs, others = [], 0
    for path in _walk(root):
        if path.suffix.lower() in DIALOG_SUFFIXES:
            dialogs.append(SourceFile(path, readable_name(path.relative_to(root))))
        else:
            others += 1
    return sorted(dialogs, key=lambda file: file.name), others


def find_export_files(root: Path, patterns: Sequence[str]) -> tuple[list[SourceFile], list[str]]:
    """Return the files that match, each once, by pattern and name, and the patterns that match none.

    Raises:
        ProjectError: `source_link_leaves_root`, when a pattern leads out of `root`.
    """
    files: dict[Path, SourceFile] = {}
    missing: list[str] = []
    for pattern in patterns:
        _check_pattern(pattern)
        found = [path for path in sorted(root.glob(pattern)) if not path.is_dir() and not _is_left_behind(path, root)]
        files |= {path: SourceFile(path, readable_name(path.relative_to(root))) for path in found if path not in files}
        missing += [] if found else [pattern]
    return list(files.values()), missing


def _is_left_behind(path: Path, root: Path) -> bool:
    return any(part == "__MACOSX" or part.startswith(".") for part in path.relative_to(root).parts)


def _check_pattern(pattern: str) -> None:
    if pattern.startswith("/") or ".." in pattern.split("/") or not pattern:
        raise ProjectError("source_link_leaves_root", path=pattern)


def _walk(root: Path) -> Iterator[Path]:
    """Yield the plain files and links under `root`, without what file managers and macOS leave behind."""
    for folder, folders, files in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if name != "__MACOSX" and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def refusal(root: Path, path: Path) -> str | None:
    """Return why a file of the dialogs is not read: `link_leaves_folder`, `no_plain_file`; None if it is."""
    real_root = os.path.realpath(root)
    if os.path.commonpath([real_root, os.path.realpath(path)]) != real_root:
        return "link_leaves_folder"
    return None if path.is_file() else "no_plain_file"
