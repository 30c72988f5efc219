"""The plan's sources -> files read, logged and entered into the corpus, one line of the log per file.

Side effects: reads the sources, writes samples, logs to stdout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from corpus_builder.archive import load_account
from corpus_builder.assemble import Assembler, InputFile
from corpus_builder.dialog import read_dialog
from corpus_builder.errors import Named, ProjectError, Value
from corpus_builder.log_lines import log_line
from corpus_builder.plan import DialogSource, SoulSource, ToolSource
from corpus_builder.reading import Reading, dropped
from corpus_builder.request import Request
from corpus_builder.samples_file import SamplesFile
from corpus_builder.soul import read_document
from corpus_builder.sources import (
    DIALOG_SUFFIXES,
    SoulFiles,
    SourceFile,
    find_dialog_files,
    find_file,
    find_soul_files,
    refusal,
)
from corpus_builder.text import Decoded, decode
from corpus_builder.tool import read_tool

CLASS_OF = {"soul": "soul", "dialog": "relation", "tool": "tool"}
#: A file of the dialogs that was never opened.
_UNREAD: dict[str, Any] = {"sample_class": "relation", "bytes": 0, "encoding": "none"}


class Collector:
    """Reads the sources in the plan's order.

    Attributes:
        soul: What was found of each soul source.
        missing: What the plan lists and is not there.
        rounds: Questions with an answer, per dialog that gave samples.
    """

    def __init__(self, request: Request, assembler: Assembler, samples: SamplesFile) -> None:
        self._plan = request.plan
        self._sources_dir = request.sources_dir
        self._dialog_dir = request.dialog_dir
        self._assembler = assembler
        self._samples = samples
        self.soul: list[SoulFiles] = []
        self.missing: list[str] = []
        self.rounds: dict[str, int] = {}

    def add_sources(self) -> None:
        """Read every source of the plan."""
        for source in self._plan.sources:
            self._assembler.expect(CLASS_OF[source.kind])
            if isinstance(source, SoulSource):
                self._add_soul(source)
            elif isinstance(source, DialogSource):
                self._add_dialogs(source)
            else:
                self._add_tool(source)

    def _add_soul(self, source: SoulSource) -> None:
        found = find_soul_files(self._sources_dir, source)
        self.soul.append(found)
        self._say_missing("soul", found.missing)
        for file in found.files:
            self._add_file(
                "soul", file, lambda text, name: read_document(text, name, source, replicas=self._plan.soul_replica)
            )

    def _add_dialogs(self, source: DialogSource) -> None:
        root = self._dialog_dir
        if root is None or not root.is_dir():
            self._say_missing("dialog", (str(root or "dialog_dir"),))
            return
        files, others = find_dialog_files(root)
        for file in files:
            reason = refusal(root, file.path)
            if reason is not None:
                self._enter("dialog", InputFile(**_UNREAD, name=file.name), dropped(reason))
                continue
            reading = self._add_file(
                "dialog", file, lambda text, name: read_dialog(text, name, source, self._plan.speakers)
            )
            if reading.samples:
                self.rounds[file.name] = reading.rounds
            for speaker in reading.unknown_speakers:
                _log("dialog", "no speaker of the plan: {speaker}", speaker=Named(speaker))
        self._add_refused_members(root)
        if others:
            _log("dialog", "left {count} file(s) of other kinds alone", count=others)

    def _add_refused_members(self, root: Path) -> None:
        account = load_account(str(root))
        for refused in account.refused if account is not None else ():
            if refused.reason == "nested_zip" or refused.name.lower().endswith(DIALOG_SUFFIXES):
                self._enter("dialog", InputFile(**_UNREAD, name=refused.name), dropped(refused.reason))

    def _add_tool(self, source: ToolSource) -> None:
        if not self._plan.include_corpus_jsonl:
            _log("tool", "left out: include_corpus_jsonl is false")
            return
        file = find_file(self._sources_dir, source.path)
        if file is None:
            self._say_missing("tool", (source.path,))
            return
        self._add_file("tool", file, lambda text, name: read_tool(text, name, source))

    def _say_missing(self, tag: str, paths: Sequence[str]) -> None:
        self.missing.extend(paths)
        for path in paths:
            _log(tag, "missing: {path}", path=Named(path))

    def _add_file(self, tag: str, file: SourceFile, read: Callable[[str, str], Reading]) -> Reading:
        """Decode and read one file; a file that is no text, or cannot be opened, is one dropped unit."""
        size, decoded, reading = 0, Decoded("", "none"), dropped("unreadable")
        try:
            data = file.path.read_bytes()
            size = len(data)
            decoded = decode(data, path=file.name)
            reading = read(decoded.text, file.name)
        except OSError:
            pass
        except ProjectError as error:
            if error.code != "text_unreadable":
                raise
            reading = dropped("not_text")
        found = InputFile(
            name=file.name,
            sample_class=CLASS_OF[tag],
            bytes=size,
            encoding=decoded.encoding,
            is_guessed=decoded.is_guessed,
            broken_bytes=decoded.broken_bytes,
        )
        self._enter(tag, found, reading)
        return reading

    def _enter(self, tag: str, file: InputFile, reading: Reading) -> None:
        self._samples.write(self._assembler.add(file, reading))
        account = self._assembler.files[-1]
        values: dict[str, Value] = {
            "path": Named(account.path), "read": account.units_read, "samples": account.samples,
            "encoding": account.encoding,
        }  # fmt: skip
        counted = "".join(f", {name} {count}" for name, count in {**account.drops, **account.notes}.items())
        _log(tag, "{path}: {read} unit(s) -> {samples} sample(s), {encoding}" + counted, **values)


def _log(tag: str, sentence: str, **values: Value) -> None:
    print(log_line(tag, sentence, **values), flush=True)
