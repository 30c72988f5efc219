"""A chat template and a tokenizer -> the ids around the contents of a conversation, by the roles of its turns. Pure.

    roles (user, assistant)  ->  ids of `<s>[INST]`, content, ids of `[/INST]`, content and its `</s>`

The template's literal texts are read once for each row of roles; of a content only its place is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from corpus_builder.errors import ProjectError
from corpus_builder.part_tokens import PartTokens
from corpus_builder.sample import Message
from corpus_builder.templates import ChatTemplate, Slot

PAIR = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Part:
    """A content in its place; several where only plain text stands between them, as a system prompt and a question.

    Attributes:
        before: The frame's ids in front of it.
        lead: Spaces with which the content is read: the frame's own, or those that the tokenizer puts there.
        slots, between: The contents, and the texts that join them.
        closing: Of an answer: the ids up to its stop token.
    """

    role: str
    before: tuple[int, ...]
    lead: str
    slots: tuple[Slot, ...]
    between: tuple[str, ...] = ()
    closing: tuple[int, ...] = ()

    def text(self, messages: Sequence[Message]) -> str:
        """Return the text that is encoded in this place."""
        said = [slot.fill(messages[slot.message].content) for slot in self.slots]
        return self.lead + said[0] + "".join(chain.from_iterable(zip(self.between, said[1:], strict=True)))


@dataclass(frozen=True, slots=True)
class Layout:
    """A conversation of certain roles: its parts, and the ids after the last one."""

    parts: tuple[Part, ...]
    after: tuple[int, ...]


class Layouts:
    """The layouts of one model's template, each made once."""

    def __init__(self, tokens: PartTokens, template: ChatTemplate) -> None:
        self._tokens = tokens
        self._template = template
        self._made: dict[tuple[tuple[str, ...], bool], Layout] = {}

    def of(self, roles: Sequence[str], *, asks: bool = False) -> Layout:
        """Return the layout of a conversation; `asks`: followed by what makes the model answer.

        Raises:
            ProjectError: `template_unrenderable`.
        """
        key = (tuple(roles), asks)
        if key not in self._made:
            made = self._make(*key)
            for part in made.parts:
                if part.role == "assistant" and part.before[-len(self.header) :] != self.header:
                    self._template.refuse("not every answer begins alike", roles)
            self._made[key] = made
        return self._made[key]

    def holds(self, roles: Sequence[str]) -> bool:
        """Whether the template takes a conversation of these roles."""
        try:
            self.of(roles)
        except ProjectError:
            return False
        return True

    @cached_property
    def header(self) -> tuple[int, ...]:
        """The ids right before every answer: the generation prompt, or else what ends a question."""
        asked, plain = (self._template.skeleton(PAIR[:1], asks=asks).texts[-1] for asks in (True, False))
        answer = self._make(PAIR, False).parts[-1]
        before = _after_last(answer.closing[-1], answer.before)
        header = self._tokens.literal(asked[len(plain) :], is_start=False) if asked.startswith(plain) else ()
        found = header if header and before[-len(header) :] == header else before
        if not found:
            self._template.refuse("nothing stands before an answer", PAIR)
        return found

    def overhead(self, roles: Sequence[str]) -> int:
        """Return the ids of a conversation that are no content's."""
        layout = self.of(roles)
        texts = [text for part in layout.parts for text in (*part.between, part.lead)]
        of_texts = sum(map(len, self._tokens.encode(texts)))
        return of_texts + len(layout.after) + sum(len(part.before) + len(part.closing) for part in layout.parts)

    def _make(self, roles: tuple[str, ...], asks: bool) -> Layout:
        skeleton = self._template.skeleton(roles, asks=asks)
        parts: list[Part] = []
        for slot, text in zip(skeleton.slots, skeleton.texts, strict=False):
            role = roles[slot.message]
            if parts and "assistant" not in (role, parts[-1].role) and not self._tokens.control_in.search(text):
                # A tokenizer may read the end of one content and the line breaks after it as one.
                last = parts[-1]
                parts[-1] = replace(last, slots=(*last.slots, slot), between=(*last.between, text))
                continue
            own = text[:-1] if text.endswith(" ") else text  # tokenizers read a space with the word after it
            lead = self._lead(own, text[len(own) :], is_start=not parts, roles=roles)
            parts.append(Part(role, self._closed(parts, own, roles), lead, (slot,)))
        after = self._closed(parts, skeleton.texts[-1], roles)
        return Layout(tuple(parts), after)

    def _closed(self, parts: list[Part], text: str, roles: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of the frame's own `text`; those that end an answer before it go to that answer."""
        ids = self._tokens.literal(text, is_start=not parts)
        if not parts or parts[-1].role != "assistant":
            return ids
        stop = next((at for at, token in enumerate(ids) if token in self._tokens.control_ids), None)
        found = self._tokens.control_in.search(text)
        if stop is None or found is None or text[: found.start()].strip():
            self._template.refuse("no control token ends an answer", roles)
        parts[-1] = replace(parts[-1], closing=ids[: stop + 1])
        return ids[stop + 1 :]

    def _lead(self, own: str, space: str, *, is_start: bool, roles: Sequence[str]) -> str:
        """Return the spaces with which a content after the frame's `own` text and `space` is read."""
        ids = self._tokens.literal(own, is_start=is_start)
        if is_start and not own:
            after = ""
        elif ids and ids[-1] in self._tokens.control_ids:
            after = next(text for text, token in self._tokens.controls.items() if token == ids[-1])
        else:
            return space
        lead = self._tokens.lead(after, space)
        if lead is None:
            self._template.refuse("its tokenizer reads a text after a control token in a way of its own", roles)
        return lead


def _after_last(stop: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids after the last `stop`: a scan could not tell what ends a question from what ends an answer."""
    return ids[len(ids) - ids[::-1].index(stop) :] if stop in ids else ids
