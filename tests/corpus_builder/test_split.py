"""Samples are split at the window; nothing is cut off, each answer is trained once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_builder.checks import missing_text
from corpus_builder.errors import ProjectError
from corpus_builder.sample import Message, Sample
from corpus_builder.split import Splitter, numbered

SYSTEM = "You keep the lamp."


def draft(*messages, sample_class="relation"):
    return Sample(messages=tuple(messages), source="s", sample_class=sample_class)


def dialog(*contents):
    return draft(*(Message("assistant" if at % 2 else "user", content) for at, content in enumerate(contents)))


def splitter(frame, max_seq_len, system_prompt=None):
    return Splitter(frame, max_seq_len=max_seq_len, system_prompt=system_prompt)


def trained(split):
    return [m.content for sample in split.samples for m in sample.messages if m.is_trained]


def test_sample_that_fits_is_itself(frame):
    whole = dialog("Who?", "Me.")
    assert splitter(frame, 100).split(whole).samples == (whole,)


def test_document_becomes_numbered_parts_of_one_question(frame):
    answer = "## A\n" + "The keeper lights the lamp. " * 8 + "\n## B\n" + "The lamp flashes at dusk. " * 8
    split = splitter(frame, 60).split(draft(Message("user", "Read a.md"), Message("assistant", answer)))
    count = len(split.samples)
    assert count > 2
    assert [s.messages[0].content for s in split.samples] == [f"Read a.md ({k}/{count})" for k in range(1, count + 1)]
    assert "".join(trained(split)) == answer


def test_dialog_is_cut_on_turn_borders_with_context_that_is_not_trained(frame):
    contents = [f"{'question' if at % 2 == 0 else 'answer'} {at} about the lamp" for at in range(12)]
    split = splitter(frame, 120).split(dialog(*contents))
    assert len(split.samples) > 1
    assert trained(split) == contents[1::2]
    second = split.samples[1].messages
    assert second[0].role == "user"
    assert next(m.train for m in second if m.role == "assistant") is False


def test_room_for_the_plans_system_prompt_is_always_kept(frame):
    split = splitter(frame, 60, SYSTEM).split(dialog("Who?", "The keeper lights the lamp. " * 12))
    for sample in split.samples:
        assert frame.cost([Message("system", SYSTEM), *sample.messages]) <= 60


def test_own_system_prompt_opens_every_window(frame):
    own = draft(Message("system", "Log."), Message("user", "Q"), Message("assistant", "lamp " * 60))
    split = splitter(frame, 60, SYSTEM * 9).split(own)
    assert len(split.samples) > 1
    assert {sample.messages[0] for sample in split.samples} == {Message("system", "Log.")}


def test_question_beyond_the_window_is_shortened_and_handed_back(frame):
    question = "\n".join(f"line {at} of the log" for at in range(60))
    split = splitter(frame, 80).split(dialog(question, "The lamp."))
    (sample,) = split.samples
    (left_out,) = split.left_out
    assert left_out.reason == "question_beyond_window"
    assert left_out.text + sample.messages[0].content == question
    assert sample.messages[1] == Message("assistant", "The lamp.")


def test_turns_after_the_last_answer_stay_where_they_fit(frame):
    contents = ["q " * 20, "a " * 20, "q " * 20, "a " * 20, "bye"]
    split = splitter(frame, 120).split(dialog(*contents))
    assert split.samples[-1].messages[-1] == Message("user", "bye")
    longer = splitter(frame, 120).split(dialog(*contents[:-1], "bye " * 60))
    assert [one.reason for one in longer.left_out] == ["no_answer"]


@pytest.mark.parametrize(("max_seq_len", "system"), [(8, None), (40, SYSTEM * 9)])
def test_window_without_room_is_refused(frame, max_seq_len, system):
    with pytest.raises(ProjectError, match="window_too_small"):
        splitter(frame, max_seq_len, system).split(dialog("Who lights the lamp?", "The keeper lights the lamp."))


def test_part_number_follows_what_the_user_said_last():
    turns = (Message("user", "a"), Message("user", "b"), Message("tool", "c"))
    assert [turn.content for turn in numbered(turns, 2, 3)] == ["a", "b (2/3)", "c"]
    assert numbered(turns, 1, 1) == turns


contents = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from("灯\n .。#`"), min_size=1, max_size=120)
conversations = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant", "tool"]), contents, st.booleans()), min_size=1, max_size=9
).filter(lambda messages: any(message.is_trained for message in messages))


@settings(max_examples=150)
@given(messages=conversations, max_seq_len=st.integers(64, 160), has_system=st.booleans())
def test_any_conversation_fits_and_loses_nothing(frame, messages, max_seq_len, has_system):
    system = SYSTEM if has_system else None
    whole = draft(*messages)
    split = splitter(frame, max_seq_len, system).split(whole)
    prompt = [Message("system", system)] if system else []
    assert all(frame.cost([*prompt, *sample.messages]) <= max_seq_len for sample in split.samples)
    assert all(any(m.is_trained for m in sample.messages) for sample in split.samples)
    assert "".join(trained(split)) == "".join(m.content for m in messages if m.is_trained)
    assert missing_text(whole, split) == ""
    context = [m.content for m in messages if not m.is_trained]
    assert all(any(content.startswith(one.text) for content in context) for one in split.left_out)
