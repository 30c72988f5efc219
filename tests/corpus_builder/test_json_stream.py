"""JSON of any size and encoding, value by value."""

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_builder.errors import ProjectError
from corpus_builder.json_stream import Broken, JsonFile, read_at, read_values

WORDS = "守灯人在黄昏点灯，海鸥陪着她。"


def values(path, data, read=read_values):
    path.write_bytes(data)
    file = JsonFile(path)
    try:
        return list(read(file)), file
    finally:
        file.close()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'[1, {"a": 2}]', [(1, 1), (2, {"a": 2})]),
        (b'{"a": 1}\r\n\n{"a": 2}', [(1, {"a": 1}), (3, {"a": 2})]),
        (b'{\n"a": 1\n}\n{\n"a": 2\n}', [(1, {"a": 1}), (2, {"a": 2})]),
        ('{"a": "\u2028"}\n'.encode(), [(1, {"a": "\u2028"})]),
        (b'{"a": 1}\nnonsense\n{"a": 2}', [(1, {"a": 1}), (2, Broken()), (3, {"a": 2})]),
        (b'[1, {"a": ', [(1, 1), (2, Broken())]),
        (b"", []),
        (b" \n\n", []),
        (b"[]", []),
    ],
)
def test_lists_lines_and_single_values(tmp_path, data, expected):
    assert values(tmp_path / "x.json", data)[0] == expected


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "gb18030", "big5"])
@pytest.mark.parametrize("shape", ["[%s]", "%s"])
def test_any_encoding(tmp_path, encoding, shape):
    words = {"big5": "守燈人在黃昏點燈，海鷗陪著她。"}.get(encoding, WORDS)
    data = (shape % json.dumps({"a": words, "b": [1, 2]}, ensure_ascii=False)).encode(encoding)
    found, file = values(tmp_path / "x.json", data)
    assert found == [(1, {"a": words, "b": [1, 2]})]
    assert file.is_guessed == (encoding in ("gb18030", "big5"))


def test_broken_byte_costs_nothing_but_itself(tmp_path):
    data = json.dumps([WORDS * 9, "b"], ensure_ascii=False).encode().replace("，".encode(), b"\xff", 1)
    found, file = values(tmp_path / "x.json", data)
    assert found[0][1] == (WORDS * 9).replace("，", "\\xff", 1)
    assert (found[1], file.broken_bytes) == ((2, "b"), 1)


def test_broken_utf16_costs_nothing_but_itself(tmp_path):
    data = '["灯亮着", "b"]'.encode("utf-16").replace("亮".encode("utf-16-le"), b"\x41\xd8")
    found, file = values(tmp_path / "x.json", data)
    assert found == [(1, "灯\\x41\\xd8着"), (2, "b")]
    assert file.broken_bytes == 2


def test_half_of_a_character_is_replaced_and_counted(tmp_path):
    found, file = values(tmp_path / "x.json", rb'["a\ud83d", "\ud83d\ude00", "\ude00", "\\ud83d", "\\\ud83d"]')
    assert [value for _, value in found] == ["a\ufffd", "\U0001f600", "\ufffd", r"\ud83d", "\\\ufffd"]
    assert file.half_characters == 3


@pytest.mark.parametrize("at", range(30))
def test_escapes_are_whole_across_chunks(tmp_path, monkeypatch, at):
    monkeypatch.setattr("corpus_builder.json_stream._CHUNK_BYTES", 16)
    monkeypatch.setattr("corpus_builder.json_stream._HEAD_BYTES", 5)
    texts = ["x" * at + "\U0001f600\\ud83d\n", WORDS]
    data = json.dumps(texts).encode().replace(rb"\u5b88", rb"\ud800")
    found, file = values(tmp_path / "x.json", data)
    assert [value for _, value in found] == [texts[0], "\ufffd" + WORDS[1:]]
    assert file.half_characters == 1


def test_values_at_a_place(tmp_path):
    data = b'{"requests": [{"a": 1}, {"a": 2}], "other": {"x": 1}}'
    assert values(tmp_path / "x.json", data, lambda f: read_at(f, "requests.item"))[0] == [(1, {"a": 1}), (2, {"a": 2})]
    found = values(tmp_path / "x.json", data, lambda f: read_at(f, "other", is_mapping=True))[0]
    assert found == [(1, ("x", 1))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.binary(max_size=80) | st.text('[]{}",:\\ud8\n1a ', max_size=40).map(str.encode))
def test_any_bytes_are_values_or_refused(tmp_path, data):
    with contextlib.suppress(ProjectError):
        assert all(number >= 1 for number, _ in values(tmp_path / "x.json", data)[0])
