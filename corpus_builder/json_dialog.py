"""Dialogs in JSON of any shape, by the field paths of a plan -> conversations. Pure.

    dialogs: "[]"                            each item of the list in the file is a dialog
    turns: conversation.session_#[]          its turns, across all of its sessions
    speaker: speaker                         in a turn: who speaks
    text: text                               and what is said
    assistant_field: conversation.speaker_b  in a dialog: the name of the one whose turns are trained

(The example is LoCoMo's.) A speaker is the user or the assistant by the plan's words, or by the two fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from corpus_builder.branches import UNKNOWN_SPEAKER, Conversation, Node, chain
from corpus_builder.json_paths import Step, find_text, find_values, ijson_prefix, parse_path
from corpus_builder.json_stream import Broken, JsonFile, read_at, read_values
from corpus_builder.plan import JsonDialogSource, Speakers


class JsonDialogReader:
    """Reads the dialogs of one source."""

    def __init__(self, source: JsonDialogSource, speakers: Speakers) -> None:
        self._dialogs = parse_path(source.dialogs)
        self._turns = parse_path(source.turns)
        self._speaker, self._text = parse_path(source.speaker), parse_path(source.text)
        self._fields = {
            role: parse_path(path)
            for role, path in (("user", source.user_field), ("assistant", source.assistant_field))
            if path is not None
        }
        self._roles = dict.fromkeys((*source.user, *speakers.user), "user")
        self._roles |= dict.fromkeys((*source.assistant, *speakers.assistant), "assistant")

    def values(self, file: JsonFile) -> Iterator[tuple[int, Any]]:
        """Yield the dialogs of a file with their numbers."""
        steps = self._dialogs
        if steps == (Step(),):
            return read_values(file)  # a list, or one dialog a line
        if steps and steps[-1].is_pattern:
            return self._values_by_key(file, steps[:-1], steps[-1])
        return read_at(file, ijson_prefix(steps))

    def _values_by_key(self, file: JsonFile, before: tuple[Step, ...], last: Step) -> Iterator[tuple[int, Any]]:
        for number, found in read_at(file, ijson_prefix(before), is_mapping=True):
            if isinstance(found, Broken):
                yield number, found
            elif last.matches(found[0]):
                yield number, found[1]

    def read(self, packed: Any) -> Conversation:
        """Return one dialog; without turns where the paths lead nowhere."""
        roles = dict(self._roles)
        for role, path in self._fields.items():
            name = find_text(packed, path)
            if name is not None:
                roles[name] = role
        return Conversation(nodes=chain([self._node(turn, roles) for turn in find_values(packed, self._turns)]))

    def _node(self, turn: Any, roles: dict[str, str]) -> Node:
        speaker, text = find_text(turn, self._speaker), find_text(turn, self._text)
        if speaker is None or text is None:
            return Node("", None, "", "", "bad_message")
        role = roles.get(speaker)
        return Node("", None, role or speaker, text, None if role else UNKNOWN_SPEAKER)
