"""Tool JSONL."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.plan import ToolSource
from corpus_builder.tool import read_tool

SOURCE = ToolSource(kind="tool", path="t.jsonl", weight=0.5)


def read(text):
    return read_tool(text, "t.jsonl", SOURCE)


def test_both_formats_and_the_own_system_prompt():
    own = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    reading = read(json.dumps({"messages": own, "meta": 1}) + "\n\n" + json.dumps({"prompt": "p", "response": "r"}))
    first, second = reading.samples
    assert [message.role for message in first.messages] == ["system", "user", "assistant"]
    assert [message.content for message in second.messages] == ["p", "r"]
    assert (first.sample_class, first.source, first.weight) == ("tool", "corpus-jsonl", 0.5)
    assert second.origin.start_line == 3
    assert (reading.units_read, reading.units_kept) == (2, 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "bad_json"),
        ("[" * 100_000, "bad_json"),
        ("[1]", "no_object"),
        ("{}", "no_messages"),
        ('{"prompt": "p"}', "no_messages"),
        ('{"messages": []}', "no_messages"),
        ('{"messages": [1]}', "bad_message"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "bad_message"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "bad_message"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no_answer"),
        ('{"messages": [{"role": "assistant", "content": "a", "train": false}]}', "no_answer"),
        ('{"prompt": "p", "response": " "}', "no_answer"),
        ('{"prompt": "p", "response": "\\ud800"}', "bad_text"),
    ],
)
def test_bad_line_is_counted_by_its_reason(line, reason):
    reading = read(line)
    assert (reading.samples, reading.units_read, reading.drops) == ((), 1, {reason: 1})


def test_line_separator_inside_a_string_is_text():
    reading = read('{"prompt": "a\u2028b", "response": "c\x85d"}')
    assert reading.samples[0].messages[0].content == "a\u2028b"


@given(st.text(max_size=60))
def test_any_text_adds_up(text):
    reading = read(text)
    assert reading.units_read == reading.units_kept + sum(reading.drops.values())
