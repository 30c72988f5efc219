"""Ids as bytes: what the tokenizer's own decoder says, at once."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.token_bytes import NO_TEXT, STOP, TokenBytes, byte_alphabet, spelled_bytes


def joined(parts) -> list:
    return list(chain.from_iterable(parts))


@pytest.fixture(scope="module")
def token_bytes(frame) -> TokenBytes:
    return TokenBytes(frame.spelling, frame.stop)


def test_alphabet_has_every_byte_once():
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_spelling_outside_the_alphabet_is_marked():
    assert spelled_bytes("Ġa▁灯").tolist() == [32, 97, -1, -1]


@given(texts=st.lists(st.text(max_size=40), max_size=5))
def test_ids_read_as_the_texts_they_were_made_of(frame, token_bytes, texts):
    ids = [[*frame.encode_text(text), frame.stop] for text in texts]
    found, ends = token_bytes.decode(np.array(joined(ids), dtype=np.int32))
    assert found.tobytes() == b"".join(text.encode() + bytes([STOP]) for text in texts)
    assert len(ends) == sum(map(len, ids))
    assert token_bytes.reads(np.array(joined(ids), dtype=np.int32), found.tobytes())
    assert ends[-1:].tolist() == ([len(found)] if texts else [])


def test_ends_of_each_id(frame, token_bytes):
    ids = frame.encode_text("灯塔 lamp")
    _, ends = token_bytes.decode(np.array(ids, dtype=np.int32))
    lengths = [len(frame.spelling(token)) for token in ids]
    assert ends.tolist() == np.cumsum(lengths).tolist()


def test_an_id_without_a_text_is_no_text(frame, token_bytes):
    found, _ = token_bytes.decode(np.array([10**5, frame.stop, frame.encode_text("a")[0]], dtype=np.int32))
    assert found.tolist() == [NO_TEXT, STOP, ord("a")]


@given(text=st.text(min_size=1, max_size=60), data=st.data())
def test_another_text_is_not_what_the_ids_say(frame, token_bytes, text, data):
    ids = np.array([*frame.encode_text(text), frame.stop], dtype=np.int32)
    said = text.encode() + bytes([STOP])
    at = data.draw(st.integers(0, len(said) - 1))
    other = bytes([data.draw(st.integers(0, 255).filter(lambda byte: byte != said[at]))])
    assert token_bytes.reads(ids, said)
    assert not token_bytes.reads(ids, said[:at] + other + said[at + 1 :])
    assert not token_bytes.reads(ids, said[:-1])
    assert not token_bytes.reads(ids, said + b"\0")


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 17, 63, 64])
def test_tokens_of_any_length_are_compared_to_their_end(size):
    spelled = {0: "a" * size, 1: "b", 2: "Ġ" * size}
    tokens = TokenBytes(spelled.get, stop=9)
    ids = np.array([0, 1, 2, 0], dtype=np.int32)
    said = b"a" * size + b"b" + b" " * size + b"a" * size
    assert tokens.reads(ids, said)
    assert not tokens.reads(ids, said[:-1] + b"\0")
    assert not tokens.reads(ids, said[:size] + b"c" + said[size + 1 :])
    assert tokens.decode(ids)[0].tobytes() == said


def test_threads_that_ask_at_a_time_are_told_the_same(frame):
    """More often than a thread would give way by itself: half a look-up must not be seen by another one."""
    ids = np.array([*range(256, 420)] * 3, dtype=np.int32)
    alone = TokenBytes(frame.spelling, frame.stop).decode(ids)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            shared = TokenBytes(frame.spelling, frame.stop)
            with ThreadPoolExecutor(4) as pool:
                parts = [ids[at : at + 40] for at in range(0, len(ids), 40)]
                found = list(pool.map(shared.decode, parts))
            assert np.concatenate([ids_bytes for ids_bytes, _ in found]).tobytes() == alone[0].tobytes()
    finally:
        sys.setswitchinterval(interval)
