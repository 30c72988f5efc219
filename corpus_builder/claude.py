"""Claude's `conversations.json` -> conversations. Pure.

    [{"uuid": …, "chat_messages": [{"uuid": "a", "sender": "human", "text": "Hi", "content": [{"type": "text", …}],
      "parent_message_uuid": "00000000-0000-4000-8000-000000000000", "attachments": [{"extracted_content": …}]}, …]}]

Older exports have no parents: there each message follows the one before it. What was pasted as an attachment is part
of what the person said. Source: exports of 2024 and 2025.
"""

from __future__ import annotations

from typing import Any

from corpus_builder.branches import Conversation, Node

_ROLES = {"human": "user", "user": "user", "assistant": "assistant"}
_CUT = ("user_canceled", "max_tokens")
_REASON_BY_TYPE = {"tool_use": "tool_call", "tool_result": "tool_result", "thinking": "thoughts", "image": "image"}


def read_claude(packed: Any) -> Conversation | None:
    """Return one conversation; None for anything else."""
    messages = packed.get("chat_messages") if isinstance(packed, dict) else None
    if not isinstance(messages, list):
        return None
    nodes: list[Node] = []
    for number, message in enumerate(messages):
        nodes.append(_node(message, number, nodes[-1].key if nodes else None))
    current = packed.get("current_leaf_message_uuid")
    return Conversation(nodes=nodes, current=current if isinstance(current, str) else None)


def _node(message: Any, number: int, before: str | None) -> Node:
    key = message.get("uuid") if isinstance(message, dict) else None
    key = key if isinstance(key, str) else f"#{number}"
    role = _ROLES.get(str(message.get("sender"))) if isinstance(message, dict) else None
    if role is None:
        return Node(key, before, "", "", "bad_message")
    parent = message.get("parent_message_uuid", before)
    text = _text(message)
    left_out = sum(block.get("type") != "text" for block in _blocks(message))
    reason = _reason(message, role, text)
    return Node(key, parent if isinstance(parent, str) else None, role, text, reason, parts_left_out=left_out)


def _reason(message: dict[str, Any], role: str, text: str) -> str | None:
    if role == "assistant" and message.get("stop_reason") in _CUT:
        return "interrupted"
    if text.strip():
        return None
    kinds = {kind for block in _blocks(message) if (kind := str(block.get("type"))) in _REASON_BY_TYPE}
    return _REASON_BY_TYPE[sorted(kinds)[0]] if kinds else None


def _text(message: dict[str, Any]) -> str:
    """Return what is said: the text blocks, else the plain text, and what is attached to it."""
    blocks = _blocks(message)
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    if not blocks:
        texts = [message.get("text")]
    attachments = message.get("attachments")
    for attachment in attachments if isinstance(attachments, list) else ():
        texts.append(attachment.get("extracted_content") if isinstance(attachment, dict) else None)
    return "\n\n".join(text for text in texts if isinstance(text, str) and text.strip())


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
