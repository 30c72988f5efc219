"""Counting costs one encoding a text, and gives what the frame gives."""

import pytest

from corpus_builder.sample import Message
from corpus_builder.split import Splitter
from corpus_builder.token_counts import TokenCounts
from tests.corpus_builder.test_split import dialog, draft

TALK = (
    Message("system", "You keep the lamp."), Message("user", "守灯人？"), Message("assistant", "", train=False),
    Message("tool", "\n{}"), Message("assistant", "Yes. 灯"),
)  # fmt: skip


class CountingFrame:
    """The frame, with the texts that it was given."""

    def __init__(self, frame):
        self._frame = frame
        self.counted: list[str] = []
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self._frame, name)

    def count_texts(self, texts):
        self.counted += texts
        self.calls += 1
        return self._frame.count_texts(texts)


@pytest.mark.parametrize("is_learnt", [True, False])
def test_counts_are_the_frames(frame, is_learnt):
    counts = TokenCounts(frame)
    if is_learnt:
        counts.learn(turn.content for turn in TALK)
    assert counts.messages(TALK) == frame.cost(TALK)
    assert counts.trained(TALK) == sum(label != -100 for label in frame.encode(TALK).labels)


def test_learnt_texts_are_encoded_once_in_one_call(frame):
    counting = CountingFrame(frame)
    splitter = Splitter(counting, max_seq_len=120, system_prompt=None)
    long = dialog(*(f"{'question' if at % 2 == 0 else 'answer'} {at} about the lamp" for at in range(40)))
    splitter.counts.learn([turn.content for turn in long.messages] * 2)
    assert (len(counting.counted), counting.calls) == (40, 1)
    split = splitter.split(long)
    assert len(split.samples) > 5
    assert sum(splitter.counts.messages(sample.messages) for sample in split.samples) > 600
    assert len(counting.counted) == 40


def test_long_answer_is_encoded_for_its_borders_and_each_part_once(frame):
    counting = CountingFrame(frame)
    splitter = Splitter(counting, max_seq_len=100, system_prompt=None)
    answer = "\n\n".join(f"Paragraph {at}: the keeper lights the lamp." for at in range(60))
    split = splitter.split(draft(Message("user", "Read"), Message("assistant", answer)))
    parts = [sample.messages[-1].content for sample in split.samples]
    assert "".join(parts) == answer
    assert len(parts) > 5
    assert sum(map(len, counting.counted)) < 2.5 * len(answer)


def test_replicas_that_ask_in_other_words_share_their_parts(frame):
    splitter = Splitter(frame, max_seq_len=1200, system_prompt=None)
    answer = "\n".join(f"{at}: the keeper lights the lamp." for at in range(300))
    parts = {
        tuple(sample.messages[-1].content for sample in splitter.split(one).samples)
        for question in ("Read", "Read it to me", "Read it to me now")
        for one in [draft(Message("user", question), Message("assistant", answer))]
    }
    assert len(parts) == 1
