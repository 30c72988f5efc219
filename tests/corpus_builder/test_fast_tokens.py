"""The fast engine gives the tokenizer's ids, or is not used."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_builder.fast_tokens import FastTokens, byte_alphabet, load_engine
from corpus_builder.frame import Frame
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


@pytest.mark.parametrize("name", ["qwen", "frame"])
def test_engine_counts_as_the_tokenizer(name, request):
    frame = request.getfixturevalue(name)
    tokens = FastTokens(frame, worth_it=0)
    assert tokens.count_texts(TEXTS) == frame.count_texts(TEXTS)
    assert tokens.is_fast
    engine = load_engine(frame.tokenizer_json)
    assert [engine.encode(text) for text in TEXTS] == frame.encode_texts(TEXTS)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=4))
def test_any_text_is_counted_as_the_tokenizer_does(qwen, fast_qwen, texts):
    assert fast_qwen.count_texts(texts) == qwen.count_texts(texts)


def test_ends_are_the_tokenizers_where_nothing_is_normalized(qwen):
    tokens = FastTokens(qwen, worth_it=0)
    text = "The keeper lights the lamp.\n\n守灯人在黄昏点灯。🌊 ok" * 3
    tokens.count_texts([text], keep_from=1)
    assert tokens.is_fast
    assert list(tokens.ends(text)) == qwen.token_ends(text)


def test_little_text_is_not_worth_an_engine(qwen):
    tokens = FastTokens(qwen)
    tokens.count_texts(TEXTS)
    assert not tokens.is_fast


def test_engine_that_differs_on_the_texts_themselves_is_not_used(qwen):
    frame = LyingFrame(qwen, "k")
    tokens = FastTokens(frame, worth_it=0)
    assert tokens.count_texts(TEXTS) == frame.count_texts(TEXTS)
    assert not tokens.is_fast


def test_text_with_a_character_that_differs_goes_to_the_tokenizer(qwen):
    frame = LyingFrame(qwen, "Ж")
    tokens = FastTokens(frame, worth_it=0)
    tokens.count_texts(TEXTS)
    texts = ["Ж", "no", "aЖa"]
    assert tokens.is_fast
    assert tokens.count_texts(texts) == frame.count_texts(texts) == [2, 1, frame.count_texts(["aЖa"])[0]]
    assert list(tokens.ends("aЖa")) == frame.token_ends("aЖa")


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


def test_alphabet_has_every_byte_once():
    assert sorted(byte_alphabet().values()) == list(range(256))
