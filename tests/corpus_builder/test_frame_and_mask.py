"""The chat frame and the mask: two opinions on the same labels, on a real tokenizer."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_builder.errors import ProjectError
from corpus_builder.frame import IGNORE_INDEX, Frame, load_frame
from corpus_builder.mask import build_assistant_mask, build_assistant_masks
from corpus_builder.sample import Message

contents = st.text(st.characters(exclude_categories=("Cs",)), max_size=40) | st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\n", "\n\nlamp", "assistant\n", "<|endoftext|>"]
)
conversations = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), contents), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def tokenizer(chatml_tokenizer_json):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(chatml_tokenizer_json)


def joined(parts) -> list:
    return list(chain.from_iterable(parts))


def mask_of(frame, ids):
    return build_assistant_mask(
        ids, im_start=frame.im_start, im_end=frame.im_end, assistant_header=frame.headers["assistant"][1:]
    )


def test_ids_are_those_of_the_rendered_text(frame, tokenizer):
    messages = [Message("user", "Who lights the lamp?"), Message("assistant", "The keeper.")]
    # The original template's text, read by the original tokenizer.
    rendered = "<|im_start|>user\nWho lights the lamp?<|im_end|>\n<|im_start|>assistant\nThe keeper.<|im_end|>\n"
    assert frame.encode(messages).ids == tokenizer.encode(rendered).ids


def test_labels_are_the_answer_and_its_stop_token(frame, tokenizer):
    messages = [Message("user", "点灯?"), Message("assistant", "守灯人")]
    encoded = frame.encode(messages)
    trained = [label for label in encoded.labels if label != IGNORE_INDEX]
    assert trained == [*tokenizer.encode("守灯人").ids, tokenizer.token_to_id("<|im_end|>")]
    assert len(encoded.labels) == len(encoded.ids)


def test_literal_control_token_in_a_text_is_text(frame, tokenizer):
    encoded = frame.encode([Message("user", "a<|im_end|>b"), Message("assistant", "<|im_start|>")])
    assert encoded.ids.count(frame.im_end) == 2
    assert encoded.ids.count(frame.im_start) == 2
    assert "a<|im_end|>b" in tokenizer.decode(encoded.ids, skip_special_tokens=False)


@pytest.mark.parametrize("content", ["\nlamp", "\n\n\nlamp", " lamp", "\tlamp", ""])
def test_leading_whitespace_keeps_the_header(frame, content):
    ids = frame.encode([Message("assistant", content)]).ids
    header = frame.headers["assistant"]
    assert tuple(ids[: len(header)]) == header
    assert sum(mask_of(frame, ids)) == len(frame.encode_text(content)) + 1


def test_turn_that_is_context_only_is_not_trained(frame):
    encoded = frame.encode([Message("assistant", "lamp", train=False)])
    assert set(encoded.labels) == {IGNORE_INDEX}
    assert any(mask_of(frame, encoded.ids))  # the scan sees an answer; the frame knows that it is context


@given(messages=conversations)
def test_mask_agrees_with_the_labels(frame, messages):
    encoded = frame.encode(messages)
    assert mask_of(frame, encoded.ids) == [label != IGNORE_INDEX for label in encoded.labels]


@given(messages=conversations)
def test_turns_can_be_read_back_from_the_ids(frame, tokenizer, messages):
    ids = frame.encode(messages).ids
    starts = [at for at, token in enumerate(ids) if token == frame.im_start]
    assert len(starts) == len(messages)
    assert frame.cost(messages) == len(ids)


@pytest.mark.parametrize("ids", ["1 2 3", b"123", ["input_ids", "attention_mask"], [1, "2"]])
def test_mask_refuses_what_is_no_list_of_ids(ids):
    with pytest.raises(TypeError):
        build_assistant_mask(ids, im_start=1, im_end=2, assistant_header=[3])


def test_mask_of_a_turn_that_is_not_closed_goes_to_the_end():
    assert build_assistant_mask([1, 3, 7, 8], im_start=1, im_end=2, assistant_header=[3]) == [False, False, True, True]


#: Ids in which turns open, close, overlap and break off: 1 opens, 2 closes, the header is 3, 4.
scribbles = st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 4, 5]), max_size=14), max_size=6)


@settings(max_examples=1000)
@given(parts=scribbles, header=st.sampled_from([(3, 4), (3,), (), (1, 3), (3, 3)]))
def test_block_scan_says_the_same_as_the_scan(parts, header):
    starts = np.cumsum([0, *map(len, parts)])
    ids = np.array(joined(parts), dtype=np.int32)
    found = build_assistant_masks(ids, starts, im_start=1, im_end=2, assistant_header=header)
    one_by_one = [build_assistant_mask(part, im_start=1, im_end=2, assistant_header=header) for part in parts]
    assert found.tolist() == joined(one_by_one)


@given(talks=st.lists(conversations, min_size=1, max_size=4))
def test_block_scan_of_real_conversations(frame, talks):
    parts = [frame.encode(messages).ids for messages in talks]
    found = build_assistant_masks(
        np.array(joined(parts), dtype=np.int32),
        np.cumsum([0, *map(len, parts)]),
        im_start=frame.im_start,
        im_end=frame.im_end,
        assistant_header=frame.headers["assistant"][1:],
    )
    assert found.tolist() == joined(mask_of(frame, ids) for ids in parts)


@pytest.mark.parametrize("header", [(3, 2), (2,)])
def test_block_scan_refuses_a_header_that_closes(header):
    with pytest.raises(ValueError, match="open and close"):
        build_assistant_masks(np.array([1]), np.array([0, 1]), im_start=1, im_end=2, assistant_header=header)


def test_model_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ProjectError, match="tokenizer_missing"):
        load_frame(tmp_path)
    with pytest.raises(ProjectError, match="base_model_missing"):
        load_frame(tmp_path / "none")


def test_tokenizer_without_chatml_is_refused():
    from tokenizers import Tokenizer, models

    with pytest.raises(ProjectError, match="template_unknown"):
        Frame(Tokenizer(models.BPE()).to_str())
