"""Drafts -> drafts without what the plan wants gone, and receipts: the kind and the line, never the value. Pure.

A value that goes is replaced where it stands, `[REDACTED:access_key]`, before anything is split or counted, so the
account of characters and tokens is that of what is trained.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from corpus_builder.sample import Message, Sample
from corpus_builder.sensitive import find_sensitive

REDACT, REPORT, OFF = "redact", "report", "off"
#: Lines that a receipt names; the count is always whole.
MAX_LINES = 20


@dataclass(slots=True)
class Receipt:
    """One kind of finding in one file: how many places, on which lines (the first ones)."""

    count: int = 0
    lines: list[int] = field(default_factory=list)


def redact_text(text: str, policies: Mapping[str, str]) -> str:
    """Return `text` with every finding whose policy is `redact` replaced by its kind."""
    parts, end = [], 0
    for span in find_sensitive(text):
        if policies.get(span.kind) == REDACT:
            parts += [text[end : span.start], f"[REDACTED:{span.kind}]"]
            end = span.end
    return "".join([*parts, text[end:]]) if parts else text


class Screen:
    """Looks through the drafts of one file."""

    def __init__(self, policies: Mapping[str, str], text: str) -> None:
        self._policies = {kind: policy for kind, policy in policies.items() if policy != OFF}
        self._text = text
        self._values: dict[tuple[str, str], int] = {}

    def clean(self, draft: Sample) -> Sample:
        """Return the draft without what is to be redacted; remember what was found."""
        if not self._policies:
            return draft
        line = draft.origin.start_line if draft.origin is not None else 0
        is_found = False
        for message in draft.messages:
            for span in find_sensitive(message.content):
                if span.kind in self._policies:
                    self._values.setdefault((span.kind, message.content[span.start : span.end]), line)
                    is_found = True
        if not is_found:
            return draft
        messages = tuple(_cleaned(message, self._policies) for message in draft.messages)
        return replace(draft, messages=messages, source=redact_text(draft.source, self._policies))

    def receipts(self) -> dict[str, Receipt]:
        """Return the findings by kind: each place in the file's text once, however many samples show it."""
        receipts: dict[str, Receipt] = {}
        if not self._values:
            return receipts
        located: Counter[tuple[str, str]] = Counter()
        breaks = [at for at, character in enumerate(self._text) if character == "\n"]
        for span in find_sensitive(self._text):
            key = (span.kind, self._text[span.start : span.end])
            if key in self._values:
                located[key] += 1
                _enter(receipts, span.kind, bisect_right(breaks, span.start) + 1)
        for (kind, value), line in self._values.items():
            if not located[kind, value]:  # spelled differently in the file: escaped, or quoted line by line
                _enter(receipts, kind, line)
        return dict(sorted(receipts.items()))


def _cleaned(message: Message, policies: Mapping[str, str]) -> Message:
    content = redact_text(message.content, policies)
    return message if content == message.content else replace(message, content=content)


def _enter(receipts: dict[str, Receipt], kind: str, line: int) -> None:
    receipt = receipts.setdefault(kind, Receipt())
    receipt.count += 1
    if line not in receipt.lines and len(receipt.lines) < MAX_LINES:
        receipt.lines.append(line)
