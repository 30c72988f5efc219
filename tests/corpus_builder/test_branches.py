"""A tree of messages: every finished branch once, nothing trained twice, every node accounted for."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.branches import CONTEXT_CHARACTERS, Conversation, Node, Place, chain, read_conversation
from corpus_builder.reading import dropped
from corpus_builder.sample import Origin

PLACE = Place(source="chatgpt:c.json#1", origin=Origin("c.json", 1, 1), sample_class="relation", weight=0.5)


def tree(*nodes, current=None):
    """Return a conversation of `key parent text` words; u… asks, a… answers, and `!reason` after it is left out."""
    found = []
    for node in nodes:
        key, parent, *reason = node.split()
        role = "user" if key.startswith("u") else "assistant"
        found.append(Node(key, parent if parent != "-" else None, role, key, reason[0][1:] if reason else None))
    return Conversation(nodes=found, current=current)


def said(reading):
    """Return the samples as words; a turn in brackets is context."""
    return [
        " ".join(one.content.replace("\n", "+") if one.train else f"({one.content})" for one in sample.messages)
        for sample in reading.samples
    ]


def test_one_branch_is_one_sample():
    reading = read_conversation(tree("u1 -", "a1 u1", "u2 a1", "a2 u2"), PLACE)
    assert said(reading) == ["u1 a1 u2 a2"]
    sample = reading.samples[0]
    assert (sample.source, sample.weight, sample.sample_class, sample.origin) == (
        PLACE.source, 0.5, "relation", PLACE.origin,
    )  # fmt: skip
    assert (reading.units_read, reading.units_kept, reading.drops, reading.rounds) == (4, 4, {}, 2)


def test_shared_beginning_is_context_of_the_second_branch():
    nodes = ["u1 -", "a1 u1", "u2 a1", "a2 u2", "u3 a1", "a3 u3", "b3 u3"]
    reading = read_conversation(tree(*nodes), PLACE)
    assert said(reading) == ["u1 a1 u2 a2", "u1 (a1) u3 a3", "u1 (a1) u3 b3"]
    assert (reading.units_kept, reading.notes) == (7, {"branches": 2, "dialogs": 1})


def test_branch_in_use_is_the_one_that_is_trained_whole():
    nodes = ["u1 -", "a1 u1", "u2 a1", "a2 u2", "u3 a1", "a3 u3"]
    assert said(read_conversation(tree(*nodes, current="a3"), PLACE)) == ["u1 a1 u3 a3", "u1 (a1) u2 a2"]


def test_what_is_left_out_does_not_cut_the_branch():
    nodes = ["s0 - !hidden", "u1 s0", "t1 u1 !tool_call", "t2 t1 !tool_result", "a1 t2", "u2 a1", "a2 u2 !interrupted"]
    reading = read_conversation(tree(*nodes), PLACE)
    assert said(reading) == ["u1 a1"]
    assert reading.drops == {"hidden": 1, "interrupted": 1, "no_answer": 1, "tool_call": 1, "tool_result": 1}
    assert (reading.units_read, reading.units_kept) == (7, 2)


def test_turns_of_one_side_in_a_row_are_merged():
    reading = read_conversation(tree("u1 -", "u2 u1", "a1 u2", "a2 a1"), PLACE)
    assert said(reading) == ["u1+u2 a1+a2"]
    assert reading.notes == {"merged_turns": 2, "dialogs": 1}


def test_long_beginning_is_not_repeated_before_a_branch():
    long = "x" * CONTEXT_CHARACTERS
    nodes = [*chain([Node("", None, "user" if at % 2 == 0 else "assistant", long) for at in range(6)])]
    nodes.append(Node("again", "4", "assistant", "another answer"))
    readings = read_conversation(Conversation(nodes=nodes), PLACE)
    assert [len(sample.messages) for sample in readings.samples] == [6, 2]
    assert readings.units_kept == 7


def test_circles_and_twins_are_a_broken_tree():
    nodes = [Node("u1", "a1", "user", "u1"), Node("a1", "u1", "assistant", "a1"), Node("a1", None, "assistant", "twin")]
    reading = read_conversation(Conversation(nodes=nodes), PLACE)
    assert (reading.samples, reading.drops) == ((), {"broken_tree": 3})


def test_answers_that_are_not_to_be_trained_are_context():
    nodes = chain([
        Node("", None, "user", "u1"), Node("", None, "assistant", "a1", train=False),
        Node("", None, "user", "u2"), Node("", None, "assistant", "a2"),
    ])  # fmt: skip
    assert said(read_conversation(Conversation(nodes=nodes), PLACE)) == ["u1 (a1) u2 a2"]
    reading = read_conversation(Conversation(nodes=nodes[:2]), PLACE)
    assert (reading.samples, reading.drops) == ((), {"no_answer": 1, "not_trained": 1})


def test_conversation_without_a_question_or_without_anything():
    reading = read_conversation(tree("a1 -", "a2 a1"), PLACE)
    assert reading.drops == {"no_question": 2}
    assert read_conversation(Conversation(nodes=[]), PLACE) == dropped("empty_dialog")


def test_own_system_prompt_stands_first():
    nodes = tree("u1 -", "a1 u1").nodes
    sample = read_conversation(Conversation(nodes=nodes, system="Be brief."), PLACE).samples[0]
    assert [message.role for message in sample.messages] == ["system", "user", "assistant"]


KEYS = st.sampled_from("abcdefgh")
NODES = st.builds(
    Node,
    KEYS,
    KEYS | st.none(),
    st.sampled_from(["user", "assistant"]),
    st.text("xyz \ud800", max_size=3),
    st.sampled_from([None, None, None, "hidden"]),
    st.booleans() | st.just(True),
)


@given(st.lists(NODES, max_size=12), KEYS | st.none())
def test_any_tree_is_accounted_for_and_no_answer_is_trained_twice(nodes, current):
    nodes = [Node(n.key, n.parent, n.role, n.text and f"{n.text}{at}", n.reason, n.train) for at, n in enumerate(nodes)]
    reading = read_conversation(Conversation(nodes=nodes, current=current), PLACE)
    assert reading.units_read == reading.units_kept + sum(reading.drops.values())
    trained = Counter(
        line
        for sample in reading.samples
        for message in sample.messages
        if message.is_trained
        for line in message.content.split("\n")
    )
    assert max(trained.values(), default=1) == 1
    assert all(any(message.is_trained for message in sample.messages) for sample in reading.samples)
