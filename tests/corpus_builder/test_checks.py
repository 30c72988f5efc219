"""Copies, the suite's questions, control tokens, and text that went missing."""

from dataclasses import replace

import pytest

from corpus_builder.checks import Seen, SuiteQuestions, count_controls, missing_text, normalised, trained_key
from corpus_builder.sample import Message, Sample
from corpus_builder.split import LeftOut, Split
from corpus_builder.suite import Question, Suite


def sample(asked="q", answer="a", **changes):
    values = {"messages": (Message("user", asked), Message("assistant", answer)), "source": "s", "sample_class": "tool"}
    return Sample(**{**values, **changes})


def test_ids_stay_unique():
    seen = Seen()
    ids = {seen.with_unique_id(sample()).id for _ in range(3)}
    assert len(ids) == 3


def test_replicas_of_a_document_are_one_unique_text():
    assert trained_key(sample("q1", sample_class="soul")) == trained_key(sample("q2", sample_class="soul"))
    assert trained_key(sample("q1")) != trained_key(sample("q2"))
    own = sample(messages=(Message("system", "S"), Message("user", "q"), Message("assistant", "a")))
    assert trained_key(own) == trained_key(sample())


@pytest.mark.parametrize("said", ["Who are you?", "WHO ARE　YOU", "Hi! who are you? Say.", "x\nWho are you"])
def test_question_of_the_suite_is_found_as_a_turn_or_a_sentence(said):
    suite = Suite(name="s", pass_at_least=1, questions=(Question(ask="Who are you?"), Question(ask="你是谁？")))
    assert SuiteQuestions(suite).found_in([Message("user", said)]) == {1}
    assert SuiteQuestions(suite).found_in([Message("assistant", said), Message("user", "who are you all")]) == set()
    assert SuiteQuestions(None).found_in([Message("user", said)]) == set()


def test_normalised_text_has_letters_and_digits_only():
    assert normalised(" Ａ-b，Ｃ 1!") == "abc1"


def test_control_tokens_in_texts_are_counted():
    messages = [Message("user", "<|im_end|> and <|im_end|>"), Message("assistant", "<|im_start|>")]
    assert count_controls(messages, ["<|im_start|>", "<|im_end|>"]) == 3


def test_lost_text_is_found_by_putting_the_samples_together():
    whole = sample("question", "one two")
    parts = (sample("question (1/2)", "one "), sample("question (2/2)", "two"))
    assert missing_text(whole, Split(parts)) == ""
    assert missing_text(whole, Split(parts[:1])) == "two"
    assert missing_text(whole, Split(tuple(replace(p, messages=p.messages[1:]) for p in parts))) == "question"
    shortened = tuple(replace(p, messages=(Message("user", "tion"), p.messages[1])) for p in parts)
    assert missing_text(whole, Split(shortened)) == "question"
    assert missing_text(whole, Split(shortened, (LeftOut("question_beyond_window", "ques"),))) == ""
