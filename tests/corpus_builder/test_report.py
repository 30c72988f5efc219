"""The report: one page, nothing from outside, everything escaped."""

import re
from html.parser import HTMLParser

import pytest

from corpus_builder.log_lines import short_hash
from corpus_builder.manifest import ClassAccount, FileAccount, Gate, Manifest
from corpus_builder.report import format_report
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
