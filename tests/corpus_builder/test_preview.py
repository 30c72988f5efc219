"""A built corpus in a terminal."""

import io

from corpus_builder.build import build
from corpus_builder.preview import pick, preview
from corpus_builder.request import load_request


class Terminal(io.StringIO):
    def isatty(self):
        return True


def asked(world, **changes):
    places = {name: str(world.out / name) for name in ("samples", "manifest")}
    return {"what": "preview", "see": "text", "class": None, "rows": 2, "lang": "en", **places, **changes}


def test_rows_are_spread_evenly_over_each_class(world):
    manifest = build(load_request(world()))
    shown = [sample.sample_class for sample in pick(world.out / "samples", manifest, None, 2)]
    assert shown == ["soul", "soul", "relation", "relation", "tool", "tool"]
    assert list(pick(world.out / "samples", manifest, None, 0)) == []


def test_terminal_gets_a_table_and_colours(world):
    build(load_request(world()))
    out = Terminal()
    preview(asked(world), out)
    assert "┃" in out.getvalue()
    assert "\x1b[32m" in out.getvalue()


def test_text_cannot_command_the_terminal(world):
    (world.dialogs / "x.md").write_text("冰朔：早\x1b]0;title\x07\n铸渊：\x1b[2J好\n", "utf-8")
    build(load_request(world()))
    out = io.StringIO()
    preview(asked(world, rows=9), out)
    assert "\\x1b]0;title\\x07" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_reader_without_texts_gets_counts(world):
    build(load_request(world()))
    out = io.StringIO()
    preview(asked(world, see="named"), out)
    assert out.getvalue().count("\n") == 4
