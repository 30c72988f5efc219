"""Documents become questions and answers; no section is dropped."""

from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.plan import SoulQuestions, SoulSource
from corpus_builder.soul import join_short, parse_sections, question, read_document

DOCUMENT = """# Keeper

Before the first section.

## Name

I am Kestrin, the keeper of Quillrock Light, and I have kept it for nine years.

## Fog

Bell.

## Code

```sh
## no heading
```
And a lamp that flashes every eighteen seconds, as it has since the beginning.
"""


def source(**changes):
    values = {
        "kind": "soul",
        "questions": SoulQuestions(whole=("Read {path}.", "What is {path}?"), section=("{section} in {path}?",)),
        "min_section_chars": 40,
    }
    return SoulSource(**{**values, **changes})


def test_whole_file_and_each_section_are_one_unit():
    reading = read_document(DOCUMENT, "a.md", source(), replicas=1)
    assert [sample.source for sample in reading.samples] == [
        "soul:a.md", "soul-section:a.md#Name", "soul-section:a.md#Fog / Code",
    ]  # fmt: skip
    assert (reading.units_read, reading.units_kept, reading.notes) == (4, 4, {"joined_sections": 1})
    assert reading.samples[0].messages[1].content == DOCUMENT.strip()


def test_section_answers_without_its_heading_but_a_joined_one_keeps_both():
    _, name, joined = read_document(DOCUMENT, "a.md", source(), replicas=1).samples
    assert name.messages[1].content.startswith("I am Kestrin")
    assert joined.messages[0].content == "Fog / Code in a.md?"
    assert joined.messages[1].content.startswith("## Fog\n\nBell.")
    assert "## no heading" in joined.messages[1].content
    assert (joined.origin.start_line, joined.origin.end_line) == (9, 18)


def test_replicas_ask_differently_and_the_first_asks_in_the_plans_words():
    whole = read_document("Only text.", "a.md", source(), replicas=3).samples
    assert [sample.messages[0].content for sample in whole] == ["Read a.md.", "What is a.md?", "Read a.md."]
    assert [sample.replica for sample in whole] == [0, 1, 2]
    assert len({sample.messages[1].content for sample in whole}) == 1


def test_without_whole_files_the_preamble_is_a_section():
    reading = read_document(DOCUMENT, "a.md", source(whole_files=False), replicas=1)
    assert reading.samples[0].source == "soul-section:a.md#Keeper / Name"
    assert "Before the first section." in reading.samples[0].messages[1].content


def test_short_last_section_joins_the_one_before():
    sections = parse_sections("## A\n" + "long " * 20 + "\n## B\nx\n", "a.md", with_preamble=False)
    (joined,) = join_short(sections, 40)
    assert (joined.title, joined.joined) == ("A / B", 2)


def test_section_without_text_is_counted():
    reading = read_document("## Only a heading", "a.md", source(), replicas=1)
    assert (reading.units_read, reading.units_kept, reading.drops) == (2, 1, {"empty_section": 1})


def test_empty_file_is_counted():
    reading = read_document(" \n\n", "a.md", source(), replicas=5)
    assert (reading.samples, reading.drops) == ((), {"empty_file": 1})


def test_values_in_a_question_are_never_read_as_templates():
    assert question(source(), 0, "{section}.md", "{path} 100%") == "{path} 100% in {section}.md?"


@given(st.text(st.sampled_from("#ab \n`~"), max_size=200), st.integers(0, 50), st.booleans())
def test_no_character_of_a_document_is_lost(text, min_chars, with_whole):
    sections = parse_sections(text, "a.md", with_preamble=True)
    assert "".join(section.text for section in sections).strip() == text.strip()
    joined = join_short(sections, min_chars)
    assert "".join(section.text for section in joined) == "".join(section.text for section in sections)
    reading = read_document(text, "a.md", source(min_section_chars=min_chars, whole_files=with_whole), replicas=2)
    assert reading.units_read == reading.units_kept + sum(reading.drops.values())
