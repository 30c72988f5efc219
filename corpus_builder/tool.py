"""Tool JSONL -> samples: `messages` (its own system prompt is kept), or `prompt` and `response`. Pure.

{"prompt": "Log: wind west 5.", "response": "{\\"wind\\": \\"W5\\"}"}
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from corpus_builder.plan import ToolSource
from corpus_builder.reading import Reading
from corpus_builder.sample import ROLES, Message, Origin, Sample


class _Refused(Exception):
    """A line that is no sample; the reason is one word of the account."""


def read_tool(text: str, path: str, source: ToolSource) -> Reading:
    """Return the samples of a JSONL file. Its units are the lines that are not blank; bad ones count by reason."""
    samples: list[Sample] = []
    drops: Counter[str] = Counter()
    for number, line in enumerate(text.split("\n"), start=1):  # never splitlines: U+2028 may stand inside a string
        if not line.strip():
            continue
        try:
            messages = _parse_line(line)
        except _Refused as refused:
            drops[str(refused)] += 1
            continue
        samples.append(
            Sample(
                messages=messages,
                source="corpus-jsonl",
                sample_class="tool",
                weight=source.weight,
                origin=Origin(path, number, number),
            )
        )
    return Reading(
        samples=tuple(samples),
        units_read=len(samples) + drops.total(),
        units_kept=len(samples),
        drops=dict(sorted(drops.items())),
    )


def _parse_line(line: str) -> tuple[Message, ...]:
    try:
        packed = json.loads(line)
    except (ValueError, RecursionError):
        raise _Refused("bad_json") from None
    if not isinstance(packed, dict):
        raise _Refused("no_object")
    if "messages" in packed:
        messages = _parse_messages(packed["messages"])
    elif "prompt" in packed and "response" in packed:
        messages = (
            Message("user", _checked_text(packed["prompt"])),
            Message("assistant", _checked_text(packed["response"])),
        )
    else:
        raise _Refused("no_messages")
    if not any(message.is_trained and message.content.strip() for message in messages):
        raise _Refused("no_answer")
    return messages


def _parse_messages(packed: Any) -> tuple[Message, ...]:
    if not isinstance(packed, list) or not packed:
        raise _Refused("no_messages")
    return tuple(_parse_message(message) for message in packed)


def _parse_message(packed: Any) -> Message:
    if not isinstance(packed, dict):
        raise _Refused("bad_message")
    train = packed.get("train", True)
    if packed.get("role") not in ROLES or not isinstance(train, bool):
        raise _Refused("bad_message")
    return Message(packed["role"], _checked_text(packed.get("content")), train)


def _checked_text(value: Any) -> str:
    """Return `value` if it is text that can be written as UTF-8 (JSON can spell half of a surrogate pair)."""
    if not isinstance(value, str):
        raise _Refused("bad_message")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _Refused("bad_text") from None
    return value
