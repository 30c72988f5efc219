"""The fast engine gives the tokenizer's ids, or is not used."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_builder.fast_tokens import FastTokens
from corpus_builder.frame import Frame
from corpus_builder.tiktoken_engine import group_plain_alternatives, load_engine
from tests.tokenizers_real import qwen_tokenizer_json

TEXTS = ["The keeper lights the lamp.", "守灯人在黄昏点灯。\n\n", "e\u0301 ① 12 345", "<|im_end|>", " \n a  b\t", "🌊"]


@pytest.fixture(scope="module")
def qwen() -> Frame:
    return Frame(qwen_tokenizer_json())


@pytest.fixture(scope="module")
def fast_qwen(qwen) -> FastTokens:
    return FastTokens(qwen, worth_it=0)


class LyingFrame:
    """A frame that counts one id more wherever a text has one certain letter."""

    def __init__(self, frame, letter):
        self._frame, self._letter = frame, letter

    def __getattr__(self, name):
        return getattr(self._frame, name)

    def encode_texts(self, texts):
        found = self._frame.encode_texts(texts)
        return [ids + [0] * (self._letter in text) for text, ids in zip(texts, found, strict=True)]

    def count_texts(self, texts):
        return [len(ids) for ids in self.encode_texts(texts)]


def as_lists(texts) -> list[list[int]]:
    return [part.tolist() for part in np.split(texts.ids, np.cumsum(texts.lengths))[:-1]]


@pytest.mark.parametrize("name", ["qwen", "frame"])
def test_engine_counts_as_the_tokenizer(name, request):
    frame = request.getfixturevalue(name)
    tokens = FastTokens(frame, worth_it=0)
    assert tokens.count_texts(TEXTS) == frame.count_texts(TEXTS)
    assert tokens.is_fast
    engine = load_engine(frame.tokenizer_json)
    assert [engine.encode(text) for text in TEXTS] == frame.encode_texts(TEXTS)
    assert as_lists(engine.encode_texts(TEXTS)) == frame.encode_texts(TEXTS)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=4))
def test_any_text_is_counted_as_the_tokenizer_does(qwen, fast_qwen, texts):
    assert fast_qwen.count_texts(texts) == qwen.count_texts(texts)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(max_size=60), max_size=6))
def test_any_text_has_the_tokenizers_ids(qwen, fast_qwen, texts):
    assert as_lists(fast_qwen.encode_texts(texts)) == qwen.encode_texts(texts)
    assert fast_qwen.is_fast


#: Stands between texts inside the engine; whoever writes it gets it back as text.
BORDER = "\x01<|between texts|>\x00"


@pytest.mark.parametrize(
    "texts",
    [
        [BORDER, "a"],
        ["a" + BORDER[:-1], "b"],
        [BORDER[1:] + "a", BORDER[:5]],
        ["a", "\u0301b", "e", "\u0338"],
        ["a", "", "", "b "],
        ["a ", " b", "\n", "\n"],
        [""],
        [],
    ],
)
def test_texts_beside_each_other_do_not_touch(qwen, fast_qwen, texts):
    assert as_lists(fast_qwen.encode_texts(texts)) == qwen.encode_texts(texts)
    assert fast_qwen.is_fast


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("worth_it", [0, 10**9])
def test_threads_change_nothing(qwen, threads, worth_it):
    texts = [f"{at} 灯塔 keeps the lamp {at * 7}. " * (at % 90) for at in range(900)]
    tokens = FastTokens(qwen, worth_it=worth_it, threads=threads)
    assert as_lists(tokens.encode_texts(texts)) == qwen.encode_texts(texts)
    assert tokens.engine == ("tokenizers" if worth_it else "tiktoken")


def test_what_the_engine_gives_up_goes_to_the_tokenizer(qwen):
    """A million spaces overflow the stack of its regular expressions."""
    texts = ["lamp", " " * 1_500_000 + "a", "灯"]
    tokens = FastTokens(qwen, worth_it=0)
    assert as_lists(tokens.encode_texts(texts)) == qwen.encode_texts(texts)
    assert tokens.count_texts(texts) == qwen.count_texts(texts)
    assert list(tokens.ends(texts[1])) == qwen.token_ends(texts[1])
    assert tokens.is_fast


def test_ends_are_the_tokenizers_where_nothing_is_normalized(qwen):
    tokens = FastTokens(qwen, worth_it=0)
    text = "The keeper lights the lamp.\n\n守灯人在黄昏点灯。🌊 ok" * 3
    tokens.count_texts([text], keep_from=1)
    assert tokens.is_fast
    assert list(tokens.ends(text)) == qwen.token_ends(text)


def test_little_text_is_not_worth_an_engine(qwen):
    tokens = FastTokens(qwen)
    tokens.count_texts(TEXTS)
    assert (tokens.is_fast, tokens.reason) == (False, "little_text")
    assert as_lists(tokens.encode_texts(TEXTS)) == qwen.encode_texts(TEXTS)


def test_engine_that_differs_on_the_texts_themselves_is_not_used(qwen):
    frame = LyingFrame(qwen, "k")
    tokens = FastTokens(frame, worth_it=0)
    assert tokens.count_texts(TEXTS) == frame.count_texts(TEXTS)
    assert (tokens.is_fast, tokens.reason) == (False, "ids_differ")


def test_engine_that_differs_on_later_texts_is_given_up(qwen):
    frame = LyingFrame(qwen, "Ж")
    tokens = FastTokens(frame, worth_it=0)
    tokens.encode_texts(TEXTS)
    assert (tokens.engine, tokens.reason) == ("tiktoken", "ids_equal")
    texts = ["a Ж", "no"]
    assert as_lists(tokens.encode_texts(texts)) == frame.encode_texts(texts)
    assert (tokens.engine, tokens.reason) == ("tokenizers", "ids_differ")


def test_text_with_a_character_that_differs_goes_to_the_tokenizer(qwen):
    frame = LyingFrame(qwen, "Ж")
    tokens = FastTokens(frame, worth_it=0)
    tokens.count_texts(TEXTS)
    texts = ["Ж", "no", "aЖa"]
    assert tokens.is_fast
    assert tokens.count_texts(texts) == frame.count_texts(texts) == [2, 1, frame.count_texts(["aЖa"])[0]]
    assert list(tokens.ends("aЖa")) == frame.token_ends("aЖa")


def test_texts_of_doubt_and_others_keep_their_order(qwen):
    """The sample of the texts is drawn from their beginnings: a character far behind is found by its own trial."""
    frame = LyingFrame(qwen, "Ж")
    tokens = FastTokens(frame, worth_it=0)
    texts = ["lamp", "a" * 2000 + "Ж", "fog", "Ж" * 0 + "灯"]
    assert as_lists(tokens.encode_texts(texts)) == frame.encode_texts(texts)
    assert tokens.is_fast


def changed(tokenizer_json, **changes):
    packed = json.loads(tokenizer_json)
    packed["model"] |= changes.pop("model", {})
    return json.dumps(packed | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}},
        {"normalizer": {"type": "NFKC"}},
        {"model": {"type": "Unigram"}},
        {"model": {"dropout": 0.1}},
        {"model": {"byte_fallback": True}},
    ],
)
def test_tokenizer_of_another_kind_has_no_engine(chatml_tokenizer_json, changes):
    assert load_engine(chatml_tokenizer_json) is not None
    assert load_engine(changed(chatml_tokenizer_json, **changes)) is None


def test_merges_that_are_not_in_the_ids_order_have_no_engine(chatml_tokenizer_json):
    merges = json.loads(chatml_tokenizer_json)["model"]["merges"]
    assert load_engine(changed(chatml_tokenizer_json, model={"merges": merges[::-1]})) is None


def test_tokenizer_of_another_kind_is_used_itself(chatml_tokenizer_json):
    frame = Frame(changed(chatml_tokenizer_json, normalizer={"type": "NFKC"}))
    tokens = FastTokens(frame, worth_it=0)
    assert as_lists(tokens.encode_texts(TEXTS)) == frame.encode_texts(TEXTS)
    assert (tokens.engine, tokens.reason) == ("tokenizers", "tokenizer_of_another_kind")


@pytest.mark.parametrize(
    ("pattern", "grouped"),
    [
        (r"a|b", r"(?:a|b)"),
        (r"(?i:'s|'t)|[^\r\n|]?\p{L}+|\s+(?!\S)|\s+", r"(?:(?i:'s|'t)|[^\r\n|]?\p{L}+)|\s+(?!\S)|(?:\s+)"),
        (r"\||[\]|]|(?<=a)b", r"(?:\||[\]|])|(?<=a)b"),
        (r"a(?=b|c)|d", r"a(?=b|c)|(?:d)"),
    ],
)
def test_plain_alternatives_become_one_group(pattern, grouped):
    assert group_plain_alternatives(pattern) == grouped


@given(text=st.text("ab1 \n'sS|]", max_size=30))
def test_grouping_changes_no_match(text):
    pattern = r"(?i:'s|'t)|[^\r\n|\w]?[a-z]+|\||[\]1]| ?[^\s\w]+|\s*\n+|\s+(?!\S)|\s+"
    assert re.findall(group_plain_alternatives(pattern), text) == re.findall(pattern, text)
