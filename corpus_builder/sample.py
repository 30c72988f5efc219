"""One training sample: the JSON line that the builder writes and the trainer reads. Pure.

    {"id": "9f…", "messages": [{"role": "user", "content": "Who are you?"},
     {"role": "assistant", "content": "I am Lumen."}], "source": "soul:docs/a.md", "class": "soul",
     "weight": 1.0, "replica": 0, "split": "train",
     "origin": {"path": "docs/a.md", "start_line": 1, "end_line": 9}}

`messages`, `source` and `weight` are the first pipeline's format: its files load here and ours load there;
LLaMA-Factory, TRL and Axolotl read `messages`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from corpus_builder.errors import Named, ProjectError

ROLES = ("system", "user", "assistant", "tool")
CLASSES = ("soul", "relation", "tool", "data")
SPLITS = ("train", "validation")
#: First pipeline's `source` prefixes, for files without a `class`.
_CLASS_BY_SOURCE = {"soul": "soul", "soul-section": "soul", "dialog": "relation", "corpus-jsonl": "tool"}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `train=False` on an assistant turn makes it context only."""

    role: str
    content: str
    train: bool = True

    @property
    def is_trained(self) -> bool:
        """Whether the model learns to say this turn."""
        return self.role == "assistant" and self.train


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sample comes from: a file and its lines, counted from 1, both ends included.

    Of a JSON file that is one list, its items stand for lines.
    """

    path: str
    start_line: int
    end_line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training row; `id` follows from the rest (`sample_id`)."""

    messages: tuple[Message, ...]
    source: str
    sample_class: str
    weight: float = 1.0
    replica: int = 0
    split: str = "train"
    origin: Origin | None = None

    @property
    def id(self) -> str:
        """The first 16 hex digits of sha256 over class, source, replica and messages."""
        return sample_id(self.sample_class, self.source, self.replica, self.messages)


def sample_id(sample_class: str, source: str, replica: int, messages: Sequence[Message]) -> str:
    """Return the id of a sample: stable across machines, orders and weights."""
    key = json.dumps(
        [sample_class, source, replica, [_message_json(message) for message in messages]], ensure_ascii=False
    )
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _message_json(message: Message) -> dict[str, Any]:
    packed: dict[str, Any] = {"role": message.role, "content": message.content}
    if not message.train:
        packed["train"] = False
    return packed


def format_sample(sample: Sample) -> str:
    """Return the JSON line of `sample`, without the newline."""
    packed: dict[str, Any] = {
        "id": sample.id,
        "messages": [_message_json(message) for message in sample.messages],
        "source": sample.source,
        "class": sample.sample_class,
        "weight": sample.weight,
        "replica": sample.replica,
        "split": sample.split,
        "origin": None
        if sample.origin is None
        else {"path": sample.origin.path, "start_line": sample.origin.start_line, "end_line": sample.origin.end_line},
    }
    return json.dumps(packed, ensure_ascii=False)


def parse_sample(line: str | bytes, *, path: str = "", line_number: int = 0) -> Sample:
    """Return the sample of one JSON line; the inverse of `format_sample`.

    A line of the first pipeline (`messages`, `source`, `weight` only) gets its class from its source.

    Raises:
        ProjectError: `sample_invalid`, naming the place and what is wrong.
        UnicodeDecodeError: bytes that are no UTF-8.
    """

    def wrong(reason: str) -> ProjectError:
        return ProjectError("sample_invalid", path=Named(path), line=line_number, reason=reason)

    try:
        packed = _from_json(line)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise wrong("not JSON") from error
    if not isinstance(packed, dict) or not isinstance(packed.get("messages"), list) or not packed["messages"]:
        raise wrong("no messages")
    messages = tuple([_parse_message(message, wrong) for message in packed["messages"]])
    source = packed.get("source", "")
    sample_class = packed.get("class") or _CLASS_BY_SOURCE.get(str(source).split(":")[0], "data")
    weight = packed.get("weight", 1.0)
    if not isinstance(source, str) or sample_class not in CLASSES:
        raise wrong("source or class")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
        raise wrong("weight must be a finite number above 0")
    split = packed.get("split", "train")
    if split not in SPLITS:
        raise wrong("split")
    replica = packed.get("replica", 0)
    if isinstance(replica, bool) or not isinstance(replica, int):
        raise wrong("replica must be a whole number")
    return Sample(
        messages=messages,
        source=source,
        sample_class=sample_class,
        weight=float(weight),
        replica=replica,
        split=split,
        origin=_parse_origin(packed.get("origin"), wrong),
    )


def _from_json(line: str | bytes) -> Any:
    """Return the value of a JSON text, as `json` reads it; raise ValueError.

    What the quicker parser refuses may be JSON all the same: halves of surrogate pairs, deep nesting.
    """
    try:
        return from_json(line)
    except ValueError:
        return json.loads(line if isinstance(line, str) else line.decode())


def _parse_message(packed: Any, wrong: Any) -> Message:
    role, content = (packed.get("role"), packed.get("content")) if isinstance(packed, dict) else (None, None)
    if role not in ROLES or not isinstance(content, str):
        raise wrong("a message needs a known role and text content")
    train = packed.get("train", True)
    if not isinstance(train, bool):
        raise wrong("train must be true or false")
    return Message(role, content, train)


def _parse_origin(packed: Any, wrong: Any) -> Origin | None:
    if packed is None:
        return None
    try:
        return Origin(path=str(packed["path"]), start_line=int(packed["start_line"]), end_line=int(packed["end_line"]))
    except (KeyError, TypeError, ValueError) as error:
        raise wrong("origin needs path, start_line, end_line") from error
