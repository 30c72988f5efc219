"""A chat that VS Code exports (`Chat: Export Chat…`) -> a conversation. Pure.

    {"responderUsername": "GitHub Copilot", "requests": [{"message": {"text": "How do I …?"}, "isCanceled": false,
      "response": [{"value": "You can "}, {"kind": "inlineReference", "name": "a.py", …}, {"value": "."}]}]}

A part without a kind is Markdown; all others but references are what the tools did. Source: microsoft/vscode,
`src/vs/workbench/contrib/chat/common/model/chatModel.ts` (`IExportableChatData`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from typing import Any

from corpus_builder.branches import Conversation, Node, chain

#: What is left of a code block whose content was an edit of a file.
_EMPTY_FENCE = re.compile(r"^(`{3,})[^`\n]*\n\s*\1[ \t]*$\n?", re.MULTILINE)


def read_copilot(packed: Any) -> Conversation | None:
    """Return one chat; None for anything else."""
    requests = packed.get("requests") if isinstance(packed, dict) else None
    return conversation_of(requests) if isinstance(requests, list) else None


def conversation_of(requests: Iterable[Any]) -> Conversation:
    """Return the chat of its requests: a question and an answer each."""
    return Conversation(nodes=chain([node for request in requests for node in _nodes(request)]))


def _nodes(request: Any) -> list[Node]:
    if not isinstance(request, dict):
        return [Node("", None, "", "", "bad_message")]
    message = request.get("message")
    asked = message.get("text") if isinstance(message, dict) else message
    hidden = "hidden" if request.get("isHidden") or request.get("shouldBeRemovedOnSend") else None
    parts = request.get("response")
    parts = parts if isinstance(parts, list) else []
    said = _markdown(parts)
    left_out = sum(not _part(part) for part in parts)
    return [
        Node("", None, "user", asked if isinstance(asked, str) else "", hidden),
        Node("", None, "assistant", said, hidden or _reason(request, said), parts_left_out=left_out),
    ]


def _reason(request: dict[str, Any], said: str) -> str | None:
    result = request.get("result")
    if request.get("isCanceled"):
        return "interrupted"
    if isinstance(result, dict) and result.get("errorDetails"):
        return "failed_answer"
    parts = request.get("response")
    return "tool_call" if not said.strip() and isinstance(parts, list) and parts else None


def _markdown(parts: list[Any]) -> str:
    return _EMPTY_FENCE.sub("", "".join(_part(part) for part in parts)).strip("\n")


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else ""
    kind = part.get("kind")
    if kind in (None, "markdownContent", "markdownVuln"):
        value = part.get("value", part.get("content"))
        value = value.get("value") if isinstance(value, dict) else value
        return value if isinstance(value, str) else ""
    return _reference(part) if kind == "inlineReference" else ""


def _reference(part: dict[str, Any]) -> str:
    """Return the name of the file or the symbol that stands in the sentence."""
    target = part.get("inlineReference")
    target = target if isinstance(target, dict) else {}
    location = target.get("location", target)
    uri = location.get("uri", location) if isinstance(location, dict) else {}
    path = uri.get("path") if isinstance(uri, dict) else None
    name = part.get("name") or target.get("name") or (posixpath.basename(path) if isinstance(path, str) else "")
    return f"`{name}`" if isinstance(name, str) and name else ""
