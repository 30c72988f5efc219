"""The plan's sources -> tasks: which files are to be read how, in the corpus's order. Nothing is opened yet.

Side effects: looks into folders, logs to stdout what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus_builder.archive import load_account
from corpus_builder.dialog import read_dialog
from corpus_builder.errors import Named, Value
from corpus_builder.exports import AnyExport, Export
from corpus_builder.log_lines import log_line
from corpus_builder.plan import DialogSource, SoulSource, Source, ToolSource
from corpus_builder.reading import Reading
from corpus_builder.request import Request
from corpus_builder.soul import read_document
from corpus_builder.sources import (
    DIALOG_SUFFIXES,
    SoulFiles,
    SourceFile,
    find_dialog_files,
    find_export_files,
    find_file,
    find_soul_files,
    refusal,
)
from corpus_builder.tool import read_tool

CLASS_OF = {"soul": "soul", "dialog": "relation", "tool": "tool"}
#: Keys of a source that say which files it has, not how they are read.
_WHICH_FILES = {"path", "paths", "globs", "files", "place"}
_JSON_SUFFIXES = (".json", ".jsonl")

Read = Callable[[str, str], Reading]
Open = Callable[[Path, str], Export]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One input file: how it is read, or why it is not.

    Attributes:
        tag: Of its log line.
        exported_as: The class of its samples where the tag does not say it.
        path: None for a file that is not opened.
        refusal: Why it is not.
        reader: All that decides how its text becomes samples; part of the cache's key.
        read: Text and name -> reading.
        open: Path and name -> a reading that comes piece by piece, for files of any size.
    """

    tag: str
    name: str
    exported_as: str | None = None
    path: Path | None = None
    refusal: str = ""
    reader: dict[str, Any] = field(default_factory=dict)
    read: Read | None = None
    open: Open | None = None

    @property
    def sample_class(self) -> str:
        """The class of its samples."""
        return self.exported_as or CLASS_OF[self.tag]


class Collector:
    """Looks for the files of the sources, in the plan's order.

    Attributes:
        soul: What was found of each soul source.
        missing: What the plan lists and is not there.
    """

    def __init__(self, request: Request) -> None:
        self._plan = request.plan
        self._sources_dir = request.sources_dir
        self._dialog_dir = request.dialog_dir
        self.soul: list[SoulFiles] = []
        self.missing: list[str] = []

    def tasks(self) -> list[Task]:
        """Return the files of every source of the plan."""
        tasks: list[Task] = []
        for source in self._plan.sources:
            if isinstance(source, SoulSource):
                tasks += self._soul(source)
            elif isinstance(source, DialogSource):
                tasks += self._dialogs(source)
            elif isinstance(source, ToolSource):
                tasks += self._tool(source)
            else:
                tasks += self._exports(source)
        return tasks

    def _soul(self, source: SoulSource) -> Iterator[Task]:
        found = find_soul_files(self._sources_dir, source)
        self.soul.append(found)
        self._say_missing("soul", found.missing)
        for file in found.files:
            yield _task(
                source, file, lambda text, name: read_document(text, name, source, replicas=self._plan.soul_replica)
            )

    def _dialogs(self, source: DialogSource) -> Iterator[Task]:
        root = self._dialog_dir
        if root is None or not root.is_dir():
            self._say_missing("dialog", (str(root or "dialog_dir"),))
            return
        files, others = find_dialog_files(root)
        for file in files:
            reason = refusal(root, file.path)
            if reason is not None:
                yield Task(tag="dialog", name=file.name, refusal=reason)
                continue
            yield _task(source, file, lambda text, name: read_dialog(text, name, source, self._plan.speakers))
        yield from _refused_members(root, "relation", DIALOG_SUFFIXES)
        if others:
            log("dialog", "left {count} file(s) of other kinds alone", count=others)

    def _tool(self, source: ToolSource) -> Iterator[Task]:
        if not self._plan.include_corpus_jsonl:
            log("tool", "left out: include_corpus_jsonl is false")
            return
        file = find_file(self._sources_dir, source.path)
        if file is None:
            self._say_missing("tool", (source.path,))
            return
        yield _task(source, file, lambda text, name: read_tool(text, name, source))

    def _exports(self, source: AnyExport) -> Iterator[Task]:
        root = self._dialog_dir if source.place == "dialogs" else self._sources_dir
        if root is None or not root.is_dir():
            self._say_missing("dialog", (str(root or "dialog_dir"),))
            return
        files, missing = find_export_files(root, source.files)
        self._say_missing("dialog", missing)
        for file in files:
            reason = refusal(root, file.path)
            if reason is not None:
                yield Task(tag="dialog", exported_as=source.sample_class, name=file.name, refusal=reason)
                continue
            yield Task(
                tag="dialog",
                exported_as=source.sample_class,
                name=file.name,
                path=file.path,
                reader=source.model_dump(mode="json", exclude=_WHICH_FILES),
                open=lambda path, name: Export(path, name, source, self._plan.speakers),
            )
        if source.place == "dialogs":
            yield from _refused_members(root, source.sample_class, _JSON_SUFFIXES)

    def _say_missing(self, tag: str, paths: Sequence[str]) -> None:
        self.missing.extend(paths)
        for path in paths:
            log(tag, "missing: {path}", path=Named(path))


def _task(source: Source, file: SourceFile, read: Read) -> Task:
    reader = source.model_dump(mode="json", exclude=_WHICH_FILES)
    return Task(tag=source.kind, name=file.name, path=file.path, reader=reader, read=read)


def _refused_members(root: Path, sample_class: str, suffixes: tuple[str, ...]) -> Iterator[Task]:
    """Yield what of the archive was left out and may have been read; a ZIP may hold anything."""
    account = load_account(str(root))
    for refused in account.refused if account is not None else ():
        if refused.name.lower().endswith((*suffixes, ".zip")):
            yield Task(tag="dialog", exported_as=sample_class, name=refused.name, refusal=refused.reason)


def class_of(source: Source) -> str:
    """Return the class of a source's samples."""
    if isinstance(source, SoulSource | DialogSource | ToolSource):
        return CLASS_OF[source.kind]
    return source.sample_class


def log(tag: str, sentence: str, **values: Value) -> None:
    """Print one line of the build's log."""
    print(log_line(tag, sentence, **values), flush=True)
