"""A conversation that may branch -> what is trained: every finished branch once, nothing twice. Pure.

    user ─ assistant ─ user ─ assistant            the branch that the person kept: all of it is trained
                         └─── user ─ assistant     an edited question: what it shares stands before it as context

A branch after the first begins with the rounds before its first new answer, `train: false`, as far as they are short.
Every node is in a sample, or counted by the reason why it is in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from corpus_builder.reading import Reading, dropped
from corpus_builder.sample import Message, Origin, Sample

#: Context of a later branch. Chosen: a quarter of a window of 4096 tokens, as the splitter keeps for it.
CONTEXT_CHARACTERS = 2000
#: The reason of a node whose `role` is the name of somebody who is neither user nor assistant.
UNKNOWN_SPEAKER = "unknown_speaker"


@dataclass(frozen=True, slots=True)
class Node:
    """One message of an export. `reason` says why it is left out, None if it is not.

    `train`: false for an answer that is context alone, because the file says so. `parts_left_out`: pictures, calls of
    tools and the like beside its text.
    """

    key: str
    parent: str | None
    role: str
    text: str
    reason: str | None = None
    train: bool = True
    parts_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation: its nodes in the file's order, its own system prompt, the last node of the branch in use."""

    nodes: Sequence[Node]
    system: str | None = None
    current: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the samples of a conversation carry: where they come from, class and weight."""

    source: str
    origin: Origin
    sample_class: str
    weight: float


def chain(nodes: Sequence[Node]) -> list[Node]:
    """Return `nodes` as a conversation without branches."""
    keys = [str(number) for number in range(len(nodes))]
    return [
        replace(node, key=key, parent=keys[at - 1] if at else None)
        for at, (key, node) in enumerate(zip(keys, nodes, strict=True))
    ]


def read_conversation(conversation: Conversation, place: Place) -> Reading:
    """Return the samples of a conversation, one a branch, and the account of its nodes."""
    if not conversation.nodes:
        return dropped("empty_dialog")
    usable: dict[str, Node] = {}
    for node in conversation.nodes:
        usable.setdefault(node.key, _checked(node))
    drops = Counter(node.reason for node in usable.values() if node.reason is not None)
    drops["broken_tree"] += len(conversation.nodes) - len(usable)  # a key that stands twice
    notes: Counter[str] = Counter()
    samples: list[Sample] = []
    kept: set[str] = set()
    rounds = 0
    reached: set[str] = set()
    for leaf in _leaves(usable, conversation.current):
        path = _path(usable, leaf, kept)
        reached.update(node.key for node in path)
        turns = _answered([node for node in path if node.reason is None])
        if not any(_is_new(node, kept) for node in turns):
            continue
        turns = turns[_context_start(turns, kept) :]
        messages, merged = _messages(turns, kept)
        rounds += sum(_is_new(node, kept) for node in turns)
        kept.update(node.key for node in turns)
        notes += Counter(merged_turns=merged, branches=1, starts_with_assistant=int(messages[0].role == "assistant"))
        samples.append(_sample(conversation, messages, place))
    unused = (node for node in usable.values() if node.reason is None and node.key not in kept)
    drops.update(_why_unused(node) if node.key in reached else "broken_tree" for node in unused)
    notes["dialogs"] = int(bool(samples))
    notes["branches"] = max(0, notes["branches"] - 1)
    notes["parts_left_out"] = sum(usable[key].parts_left_out for key in kept)
    return Reading(
        samples=tuple(samples),
        units_read=len(conversation.nodes),
        units_kept=len(kept),
        drops=dict(sorted((+drops).items())),
        notes=dict(sorted((+notes).items())),
        rounds=rounds,
        unknown_speakers=tuple(sorted({node.role for node in usable.values() if node.reason == UNKNOWN_SPEAKER})),
    )


def _checked(node: Node) -> Node:
    """Return the node with a reason if its text is none that can be trained."""
    if node.reason is not None:
        return node
    if not node.text.strip():
        return replace(node, reason="empty_turn")
    try:
        node.text.encode("utf-8")
    except UnicodeEncodeError:
        return replace(node, reason="bad_text")
    return node


def _why_unused(node: Node) -> str:
    if node.role == "user":
        return "no_answer"
    return "no_question" if node.train else "not_trained"


def _is_new(node: Node, kept: set[str]) -> bool:
    return node.role == "assistant" and node.train and node.key not in kept


def _leaves(nodes: dict[str, Node], current: str | None) -> list[str]:
    """Return the ends of all branches, that of the branch in use first."""
    parents = {node.parent for node in nodes.values()}
    leaves = [key for key in nodes if key not in parents]
    return sorted(leaves, key=lambda key: key != current)  # stable


def _path(nodes: dict[str, Node], leaf: str, kept: set[str]) -> list[Node]:
    """Return the way to a leaf from its root, or from where it shares more with other branches than it will show."""
    path: list[Node] = []
    seen: set[str] = set()
    shared = 0
    at: str | None = leaf
    while at is not None and at in nodes and at not in seen:  # some files hold circles
        node = nodes[at]
        path.append(node)
        seen.add(at)
        shared += len(node.text) if at in kept else 0
        if node.role == "assistant" and shared > 2 * CONTEXT_CHARACTERS:
            break
        at = node.parent
    return path[::-1]


def _answered(turns: list[Node]) -> list[Node]:
    """Return the turns up to the last answer; none where nobody asks."""
    last = max((at for at, node in enumerate(turns) if node.role == "assistant"), default=-1)
    turns = turns[: last + 1]
    return turns if any(node.role == "user" for node in turns) else []


def _context_start(turns: Sequence[Node], trained: set[str]) -> int:
    """Return where a branch begins: at its first turn, or at a round before what is new in it."""
    if not any(node.role == "assistant" and node.key in trained for node in turns):
        return 0
    new = next(at for at, node in enumerate(turns) if _is_new(node, trained))
    start = _question_start(turns, new)
    room = CONTEXT_CHARACTERS
    while start > 0:
        earlier = _question_start(turns, start - 1)
        room -= sum(len(node.text) for node in turns[earlier:start])
        if room < 0 or turns[earlier].role != "user":
            break
        start = earlier
    return start


def _question_start(turns: Sequence[Node], at: int) -> int:
    """Return where the question before the answer `at` starts; 0 if there is none."""
    while at > 0 and turns[at].role == "assistant":
        at -= 1
    while at > 0 and turns[at - 1].role == "user":
        at -= 1
    return at


def _messages(turns: Sequence[Node], trained: set[str]) -> tuple[list[Message], int]:
    """Return the turns as messages, those of one side in a row merged where they share their fate, and how many."""
    messages: list[Message] = []
    for node in turns:
        train = node.role != "assistant" or (node.train and node.key not in trained)
        last = messages[-1] if messages else None
        if last is not None and (last.role, last.train) == (node.role, train):
            messages[-1] = replace(last, content=f"{last.content}\n{node.text}")
        else:
            messages.append(Message(node.role, node.text, train))
    return messages, len(turns) - len(messages)


def _sample(conversation: Conversation, messages: Sequence[Message], place: Place) -> Sample:
    system = [Message("system", conversation.system)] if conversation.system else []
    return Sample(
        messages=(*system, *messages),
        source=place.source,
        sample_class=place.sample_class,
        weight=place.weight,
        origin=place.origin,
    )
