"""A tokenizer that reads the parts of a conversation one by one as it would read the whole. Pure.

Some tokenizers put a space before what they read: at the very beginning, or after every control token. A part in the
middle of a text must not get one, and a part that follows a control token must. What this tokenizer does is found by
asking it, not by the names of its settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

#: One of a tokenizer's added tokens, packed.
Added = dict[str, Any]
#: Something that begins a word in every vocabulary.
_WORD = "a"


class PartTokens:
    """One tokenizer, for literal texts of a frame (control tokens are read) and for contents (none ever is).

    A control token is an added token that is marked as special or that the template names. Other added tokens are
    words of the vocabulary (Gemma's line breaks, tabs and HTML tags are such), in contents too.

    Attributes:
        controls: Control tokens by their text.
        content: Reads contents, and adds no space of its own.
    """

    def __init__(self, tokenizer_json: str, named: str) -> None:
        """`named`: the template and the special tokens' texts; what stands there is a control token."""
        from tokenizers import Tokenizer

        self.whole = Tokenizer.from_str(tokenizer_json)
        packed = json.loads(tokenizer_json)
        packed["normalizer"] = _without_prefix(packed.get("normalizer"))
        packed["pre_tokenizer"] = _without_prefix(packed.get("pre_tokenizer"))
        self._middle = Tokenizer.from_str(json.dumps(packed, ensure_ascii=False))
        added = packed.get("added_tokens") or []
        controls = [token for token in added if token["special"] or token["content"] in named]
        self.controls = {token["content"]: int(token["id"]) for token in controls}
        self._strips_left = frozenset(token["content"] for token in controls if token["lstrip"])
        packed["added_tokens"] = _unreadable(added, frozenset(self.controls), packed["model"])
        packed["post_processor"] = None
        self.content = Tokenizer.from_str(json.dumps(packed, ensure_ascii=False))
        unknown = packed["model"].get("unk_token")
        #: An unknown character is no control token, though its id may be an added token's.
        self.control_ids = frozenset(self.controls.values()) - {self.whole.token_to_id(unknown or "")}

    @cached_property
    def control_in(self) -> re.Pattern[str]:
        """Finds the first control token of a text."""
        longest_first = sorted(self.controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def literal(self, text: str, *, is_start: bool) -> tuple[int, ...]:
        """Return the ids of a frame's own text; `is_start`: nothing stands before it, else a content does."""
        if is_start:
            return tuple(self.whole.encode(text, add_special_tokens=False).ids)
        found = self.control_in.search(text)
        at = len(text) if found is None else found.start()
        head = text[:at].rstrip() if found is not None and found.group() in self._strips_left else text[:at]
        ids = self._middle.encode(head, add_special_tokens=False).ids
        return (*ids, *self.whole.encode(text[at:], add_special_tokens=False).ids)

    def lead(self, after: str, space: str) -> str | None:
        """Return the spaces with which the first word after `after` must be read.

        Args:
            after: The control token that stands before it; empty: nothing does, it begins the text.
            space: The space that the frame has there, or none.

        Returns:
            None where no number of spaces gives what the tokenizer makes of the whole.
        """
        whole = self.whole.encode(after + space + _WORD, add_special_tokens=False).ids[1 if after else 0 :]
        return next((lead for lead in ("", " ", "  ") if self._read(lead + _WORD) == whole), None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text as content: never a control token, whatever the vocabulary holds."""
        found = [encoding.ids for encoding in self.content.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [
            ids if self.control_ids.isdisjoint(ids) else self._in_parts(text)
            for text, ids in zip(texts, found, strict=True)
        ]

    def _in_parts(self, text: str) -> list[int]:
        """Return the ids of a text in which a control token is written, cut inside of it."""
        ids: list[int] = []
        start = 0
        for found in self.control_in.finditer(text):
            ids += self._read(text[start : found.start() + 1])
            start = found.start() + 1
        ids += self._read(text[start:])
        return [token for token in ids if token not in self.control_ids]

    def _read(self, text: str) -> list[int]:
        return list(self.content.encode(text, add_special_tokens=False).ids)


def _without_prefix(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer, packed, without the space that it puts before a text."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return None
    changed = {
        key: [part for part in map(_without_prefix, value) if part is not None] if isinstance(value, list) else value
        for key, value in step.items()
    }
    if step.get("type") in ("Metaspace", "ByteLevel"):
        changed["add_prefix_space"] = False
    if step.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    return changed


def _unreadable(
    added: Sequence[dict[str, Any]], controls: frozenset[str], model: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the added tokens with the control tokens out of reach: no text spells them, and no other id moves."""
    vocab = model["vocab"]
    spelled = set(vocab) if isinstance(vocab, dict) else {token for token, _ in vocab}
    return [
        token | {"content": f"\U000f0000{token['id']}"} if token["content"] in controls else token
        for token in added
        if token["content"] not in controls or token["content"] not in spelled
    ]
