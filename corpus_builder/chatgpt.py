"""ChatGPT's `conversations.json` -> conversations. Pure.

    [{"title": …, "current_node": "c", "mapping": {"a": {"message": null, "parent": null, "children": ["b"]},
      "b": {"parent": "a", "message": {"author": {"role": "user"}, "status": "finished_successfully",
        "content": {"content_type": "text", "parts": ["Hi"]}}}, "c": {…}}}]

A node without a message holds nothing and is no unit. Source: exports of 2023 to 2025, and the fixtures of
danny-avila/LibreChat (`api/server/utils/import/__data__`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from corpus_builder.branches import Conversation, Node

#: What the model said to itself, or to a tool, and what tools said, by the content's type.
_REASON_BY_TYPE = {
    "code": "tool_call",
    "execution_output": "tool_result",
    "tether_browsing_display": "tool_result",
    "tether_quote": "tool_result",
    "sonic_webpage": "tool_result",
    "thoughts": "thoughts",
    "reasoning_recap": "thoughts",
    "user_editable_context": "hidden",
    "model_editable_context": "hidden",
    "system_error": "failed_answer",
}
_TEXT_TYPES = ("text", "multimodal_text")
#: Marks of sources: `\ue200cite\ue202turn0search0\ue201`, and the older `【6†source】`.
_CITATION = re.compile("\ue200[^\ue201]*\ue201|【\\d+(?::\\d+)?†[^】]*】")


def read_chatgpt(packed: Any) -> Conversation | None:
    """Return one conversation; None for anything else."""
    if not isinstance(packed, dict) or not isinstance(packed.get("mapping"), dict):
        return None
    mapping: dict[str, Any] = packed["mapping"]
    followed = _answered_on(mapping)
    nodes = [
        _node(key, node, is_followed=key in followed)
        for key, node in mapping.items()
        if not isinstance(node, dict) or node.get("message") is not None
    ]
    current = packed.get("current_node")
    return Conversation(nodes=_joined(nodes, mapping), current=current if isinstance(current, str) else None)


def _answered_on(mapping: Mapping[str, Any]) -> set[str]:
    """Return the nodes after which the assistant goes on: an answer cut by the limit may be continued."""
    return {
        node["parent"]
        for node in mapping.values()
        if isinstance(node, dict) and isinstance(node.get("parent"), str) and _role(node.get("message")) == "assistant"
    }


def _joined(nodes: list[Node], mapping: Mapping[str, Any]) -> list[Node]:
    """Return the nodes with the nearest ancestor that is one of them for a parent."""
    units = {node.key for node in nodes}
    return [replace(node, parent=_ancestor(node.parent, units, mapping)) for node in nodes]


def _ancestor(key: str | None, units: set[str], mapping: Mapping[str, Any]) -> str | None:
    seen: set[str] = set()
    while key is not None and key not in units and key not in seen:
        seen.add(key)
        node = mapping.get(key)
        parent = node.get("parent") if isinstance(node, dict) else None
        key = parent if isinstance(parent, str) else None
    return key if key in units else None


def _role(message: Any) -> str:
    author = message.get("author") if isinstance(message, dict) else None
    role = author.get("role") if isinstance(author, dict) else None
    return role if isinstance(role, str) else ""


def _node(key: str, packed: Any, *, is_followed: bool) -> Node:
    if not isinstance(packed, dict) or not isinstance(packed["message"], dict):
        return Node(key, None, "", "", "bad_message")
    message, parent = packed["message"], packed.get("parent")
    text, left_out = _text(message.get("content"))
    reason = _reason(message, is_followed=is_followed) or ("image" if left_out and not text else None)
    node = Node(key, parent if isinstance(parent, str) else None, _role(message), text, reason)
    return replace(node, parts_left_out=left_out)


def _reason(message: Mapping[str, Any], *, is_followed: bool) -> str | None:
    role, metadata = _role(message), _mapping(message.get("metadata"))
    kind = _mapping(message.get("content")).get("content_type")
    if metadata.get("is_visually_hidden_from_conversation") or message.get("weight") == 0:
        return "hidden"
    if role == "system":
        return "system"
    if role == "tool":
        return "tool_result"
    if role not in ("user", "assistant"):
        return "bad_message"
    if role == "assistant" and message.get("recipient") not in (None, "all"):
        return "tool_call"
    if isinstance(kind, str) and kind in _REASON_BY_TYPE:
        return _REASON_BY_TYPE[kind]
    if kind not in _TEXT_TYPES:
        return "bad_message"
    return "interrupted" if role == "assistant" and _is_cut(message, metadata, is_followed=is_followed) else None


def _is_cut(message: Mapping[str, Any], metadata: Mapping[str, Any], *, is_followed: bool) -> bool:
    ending = _mapping(metadata.get("finish_details")).get("type")
    if ending == "max_tokens":
        return not is_followed
    return ending == "interrupted" or message.get("status") not in (None, "finished_successfully")


def _text(content: Any) -> tuple[str, int]:
    """Return the text parts without the marks of sources, and what is left out; spoken parts have their text inside."""
    parts = _mapping(content).get("parts")
    texts, left_out = [], 0
    for part in parts if isinstance(parts, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            left_out += 1
    text, citations = _CITATION.subn("", "\n".join(text for text in texts if text.strip()))
    return text.strip("\n"), left_out + citations


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
