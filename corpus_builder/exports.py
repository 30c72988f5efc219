"""Exported conversations -> samples, one conversation after another, however large the file is.

    ChatGPT and Claude `conversations.json` · chats that VS Code exports · ShareGPT · OpenAI `messages` · any JSON

Side effects: reads the file. Units are turns: each is in a sample, or counted by the reason why it is in none; a
conversation that cannot be read is one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from corpus_builder.branches import Conversation, Place, read_conversation
from corpus_builder.chat_lists import read_chat
from corpus_builder.chatgpt import read_chatgpt
from corpus_builder.claude import read_claude
from corpus_builder.copilot import conversation_of, read_copilot
from corpus_builder.json_dialog import JsonDialogReader
from corpus_builder.json_stream import Broken, JsonFile, read_at, read_values
from corpus_builder.plan import ChatSource, ExportSource, JsonDialogSource, Speakers
from corpus_builder.reading import Reading, ReadingStream, dropped
from corpus_builder.sample import Origin

AnyExport = ExportSource | ChatSource | JsonDialogSource
Values = Callable[[JsonFile], Iterator[tuple[int, Any]]]
Read = Callable[[Any], Conversation | None]
_READERS: dict[str, Read] = {"chatgpt": read_chatgpt, "claude": read_claude, "copilot": read_copilot}


class Export:
    """One open export file.

    Attributes:
        encoding, is_guessed: How it is decoded.
        reading: What it gives; closes the file when it has run out.
    """

    def __init__(self, path: Path, name: str, source: AnyExport, speakers: Speakers) -> None:
        """Open the file; raise OSError, or `text_unreadable` where its beginning is no text."""
        self._file = JsonFile(path)
        self.encoding, self.is_guessed = self._file.encoding, self._file.is_guessed
        self.reading = ReadingStream(self._parts(name, source, speakers))

    def close(self) -> None:
        """Close the file, read to its end or not."""
        self._file.close()

    def _parts(self, name: str, source: AnyExport, speakers: Speakers) -> Iterator[Reading]:
        values, read = _reader(source, speakers)
        is_empty = True
        for number, value in values(self._file):
            is_empty = False
            if isinstance(value, Broken):
                yield dropped(value.reason)
                continue
            conversation = read(value)
            if conversation is None:
                yield dropped("other_format")
                continue
            yield read_conversation(conversation, _place(source, name, number))
        if is_empty:
            yield dropped("no_dialogs")
        notes = {"broken_bytes": self._file.broken_bytes, "half_characters": self._file.half_characters}
        yield Reading(notes={note: count for note, count in notes.items() if count})
        self._file.close()


def _reader(source: AnyExport, speakers: Speakers) -> tuple[Values, Read]:
    """Return how the values of a file are found, and how one becomes a conversation."""
    if isinstance(source, JsonDialogSource):
        reader = JsonDialogReader(source, speakers)
        return reader.values, reader.read
    if isinstance(source, ChatSource):
        return read_values, lambda value: read_chat(value, source.kind)
    if source.kind == "copilot":
        return _chats, lambda value: value if isinstance(value, Conversation) else read_copilot(value)
    return read_values, _READERS[source.kind]


def _chats(file: JsonFile) -> Iterator[tuple[int, Any]]:
    """Yield the one chat of a file, its requests read one by one; or the chats of a list."""
    if not file.peek().startswith(b"{"):
        yield from read_values(file)
        return
    broken: list[Broken] = []
    requests = (value for _, value in read_at(file, "requests.item") if not _collected(value, broken))
    conversation = conversation_of(requests)
    if conversation.nodes or not broken:
        yield 1, conversation
    yield from ((1, one) for one in broken)


def _collected(value: Any, broken: list[Broken]) -> bool:
    if isinstance(value, Broken):
        broken.append(value)
    return isinstance(value, Broken)


def _place(source: AnyExport, name: str, number: int) -> Place:
    return Place(
        source=f"{source.kind}:{name}#{number}",
        origin=Origin(name, number, number),
        sample_class=source.sample_class,
        weight=source.weight,
    )
