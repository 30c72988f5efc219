"""Rows of chat data, ShareGPT's and OpenAI's -> conversations. Pure.

    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "system": "…"}
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", …, "weight": 0}]}

Calls of tools and their results are left out: a frame of text alone would teach another form than the model's own.
Source: LLaMA-Factory `data/README.md`; https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from typing import Any

from corpus_builder.branches import Conversation, Node, chain

LISTS = {"sharegpt": "conversations", "messages": "messages"}
_ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "bing": "assistant", "bard": "assistant",
}  # fmt: skip
_SYSTEM = ("system", "developer")
_REASON_BY_ROLE = {
    "tool": "tool_result", "function": "tool_result", "observation": "tool_result", "function_call": "tool_call",
}  # fmt: skip


def read_chat(packed: Any, kind: str) -> Conversation | None:
    """Return one row of the kind `sharegpt` or `messages`; None for anything else."""
    turns = packed.get(LISTS[kind]) if isinstance(packed, dict) else None
    if not isinstance(turns, list):
        return None
    own = packed.get("system")
    system = own if isinstance(own, str) and own.strip() else None
    nodes: list[Node] = []
    for turn in turns:
        if system is None and not nodes and _role(turn) in _SYSTEM and (text := _text(turn)).strip():
            system = text
            continue
        nodes.append(_node(turn))
    return Conversation(nodes=chain(nodes), system=system)


def _role(turn: Any) -> str:
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return role.lower() if isinstance(role, str) else ""


def _node(turn: Any) -> Node:
    role = _role(turn)
    if role in _SYSTEM:
        return Node("", None, "", "", "system")
    if role in _REASON_BY_ROLE:
        return Node("", None, "", "", _REASON_BY_ROLE[role])
    if role not in _ROLES:
        return Node("", None, "", "", "bad_message")
    text = _text(turn)
    train = turn.get("train", True) is not False and turn.get("weight", 1) != 0
    return Node("", None, _ROLES[role], text, _reason(turn, text), train, _count_left_out(turn))


def _reason(turn: dict[str, Any], text: str) -> str | None:
    if text.strip():
        return None
    if turn.get("tool_calls") or turn.get("function_call"):
        return "tool_call"
    return "image" if isinstance(_content(turn), list) and _content(turn) else None


def _count_left_out(turn: dict[str, Any]) -> int:
    content, calls = _content(turn), turn.get("tool_calls")
    parts = content if isinstance(content, list) else []
    pictures = sum(not isinstance(part, str) and not (isinstance(part, dict) and "text" in part) for part in parts)
    return pictures + (len(calls) if isinstance(calls, list) else int(bool(turn.get("function_call"))))


def _content(turn: dict[str, Any]) -> Any:
    return turn.get("content", turn.get("value"))


def _text(turn: dict[str, Any]) -> str:
    content = _content(turn)
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str) and text.strip())
