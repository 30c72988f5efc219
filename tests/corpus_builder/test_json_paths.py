"""Field paths of a plan find what stands there, in a fixed order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.json_paths import find_text, find_values, ijson_prefix, parse_path

TREE = {
    "a": {"b": [1, [2, 3]], "s_10": ["x"], "s_2": ["y", "z"], "s_2_time": "noon", "s_": 0},
    "list": [{"n": "one"}, {"n": 2}, {"m": 3}],
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", [TREE]),
        ("a.b", [[1, [2, 3]]]),
        ("a.b[]", [1, [2, 3]]),
        ("a.b[][]", [2, 3]),
        ("a.s_#[]", ["y", "z", "x"]),
        ("a.s_*", [0, ["y", "z"], "noon", ["x"]]),
        ("list[].n", ["one", 2]),
        ("list.n", []),
        ("a[]", []),
        ("none.b", []),
    ],
)
def test_values_at_a_path(path, found):
    assert list(find_values(TREE, parse_path(path))) == found


def test_text_at_a_path_is_a_text():
    assert find_text(TREE, parse_path("list[].n")) == "one"
    assert find_text(TREE, parse_path("a.b")) is None


@pytest.mark.parametrize("path", ["a..b", ".", "a.", "a[", "a[0]", "a.[]", "[]b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ValueError, match="is no path"):
        parse_path(path)


def test_path_as_ijson_spells_it():
    assert ijson_prefix(parse_path("")) == ""
    assert ijson_prefix(parse_path("[].dialogs[]")) == "item.dialogs.item"


@given(st.text("ab.[]#*\\(", max_size=8))
def test_any_text_is_a_path_or_refused(path):
    try:
        steps = parse_path(path)
    except ValueError:
        return
    assert list(find_values(TREE, steps)) == list(find_values(TREE, parse_path(path)))
