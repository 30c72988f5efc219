"""The report: one page, nothing from outside, everything escaped."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.full_report import SHOWN_PER_CLASS, Showcase, format_full_report
from corpus_builder.histogram import histogram
from corpus_builder.log_lines import short_hash
from corpus_builder.manifest import ClassAccount, FileAccount, Finding, Gate, Manifest
from corpus_builder.report import MAX_ROWS, format_report
from corpus_builder.sample import Message, Sample
from corpus_builder.say import SEE_NAMES

HOSTILE = '<script src="https://evil.example">&.md'


def manifest():
    account = {"bytes": 1234, "encoding": "utf-8", "units_read": 4, "units_kept": 3, "samples": 5}
    return Manifest(
        plan_name=HOSTILE,
        plan_digest="d",
        tokenizer="t",
        max_seq_len=4096,
        files=(
            FileAccount(
                path=HOSTILE, sample_class="relation", drops={"no_answer": 1}, notes={"new_note": 2}, **account
            ),
        ),
        missing=("docs/none.md",),
        classes={
            "relation": ClassAccount(
                samples=5, unique=4, characters=17, tokens=54321, trained_tokens=999, lost_tokens=0
            )
        },
        gates=(
            Gate(name="dialog_rounds", verdict="warn", found=1, wanted=2, where=(HOSTILE,)),
            Gate(name="soul_files_found", verdict="stop", found=0.5, wanted=0.66, where=("docs/none.md",)),
        ),
        samples_sha256="0" * 64,
    )


@pytest.mark.parametrize("lang", ["zh", "en"])
def test_page_has_the_manifests_counts_and_no_names(lang):
    page = format_report(manifest(), lang)
    for text in ("54,321", "999", "1,234", "docs/none.md", "#" + short_hash(HOSTILE), f'lang="{lang}"', "0" * 64):
        assert text in page
    assert page.count("evil.example") == 2  # the plan's name is public: title and heading, escaped


def test_names_are_shown_if_asked_for_and_everything_is_escaped():
    page = format_report(manifest(), "en", see=SEE_NAMES)
    assert page.count("evil.example") == 4
    assert "<script" not in page
    assert "new_note: 2" in page


def test_page_takes_nothing_from_outside():
    page = format_report(manifest(), "zh")
    tags = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags.append((tag, dict(attributes)))

    Reader().feed(page)
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe"}
    assert not [attributes for _, attributes in tags if "src" in attributes or "href" in attributes]
    policy = next(a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert not re.search(r"url\(|@import", page)


def with_findings():
    found = [
        Finding(kind="email", action="reported", path=HOSTILE, count=30, lines=(3, 9)),
        Finding(kind="email", action="reported", path="b.md", count=2, lines=(1,)),
        Finding(kind="near_copy", action="reported", path="c.md", count=1, lines=(4,), others=(HOSTILE,)),
    ]
    return replace(manifest(), findings=tuple(found), contradictory_prompts=3)


def test_findings_are_counts_in_public_and_places_for_who_may_see_names():
    public = format_report(with_findings(), "en")
    assert '<td>e-mail address</td><td>reported only</td><td class="number">32</td>' in public
    assert 'id="places"' not in public
    named = format_report(with_findings(), "en", see=SEE_NAMES)
    assert "3, 9 …" in named
    assert "answers: 3" in named


def test_histogram_has_a_bar_for_each_part_with_samples():
    drawn = histogram((0, 4, 1, 0), limit=400, caption="soul")
    assert drawn.count("<rect") == 2
    assert "<title>101–200: 4</title>" in drawn
    assert "style=" not in drawn


def sample(number, sample_class="soul", **changes):
    said = (Message("user", f"q{number}"), Message("assistant", "The keeper <b>灯</b>", **changes))
    return Sample(messages=said, source="s", sample_class=sample_class)


def test_full_page_marks_every_trained_token_and_its_stop(frame):
    shown = [sample(1), sample(2, train=False)]
    page = format_full_report(manifest(), "en", shown, frame)
    marked = re.findall(r'<span class="taught(?:-too)?">(.*?)</span>', page, re.DOTALL)
    assert "".join(marked) == "The keeper &lt;b&gt;灯&lt;/b&gt;■"
    assert len(marked) == 1 + len(frame.cut_at_tokens("The keeper <b>灯</b>")) > 4
    assert "2 of 5 samples are shown" in page


def test_showcase_is_spread_over_each_class():
    samples = [sample(at) for at in range(100)] + [sample(at, "tool") for at in range(3)]
    showcase = Showcase({"soul": 100, "tool": 3})
    assert list(showcase.passing(samples)) == samples
    shown = [int(one.messages[0].content[1:]) for one in showcase.shown if one.sample_class == "soul"]
    assert shown == [at * 100 // SHOWN_PER_CLASS for at in range(SHOWN_PER_CLASS)]
    assert sum(one.sample_class == "tool" for one in showcase.shown) == 3


@given(st.text(max_size=60))
def test_pieces_at_tokens_are_the_text(frame, text):
    assert "".join(frame.cut_at_tokens(text)) == text


def test_table_of_very_many_files_begins_with_those_that_need_a_look():
    plain = FileAccount(
        path="plain.md", sample_class="tool", bytes=1, encoding="utf-8", units_read=1, units_kept=1, samples=1
    )
    page = format_report(replace(manifest(), files=(plain,) * (MAX_ROWS + 5) + manifest().files), "en", see=SEE_NAMES)
    assert page.count("plain.md") == MAX_ROWS - 1
    assert "new_note: 2" in page
    assert "6 more are in the manifest" in page
