"""The doctor's part of a summary: every problem with its next step, then all that was looked at. Pure."""

from __future__ import annotations

from controller.findings import subject_words
from controller.markdown import bullets, escape, fence, table
from controller.reports import DoctorReport, Finding
from controller.words import Words
from corpus_builder.say import error_lines, spoken

MARKS = {"ok": "✅", "note": "ℹ️", "wrong": "❌", "untried": "–"}


def doctor(report: DoctorReport, words: Words) -> list[str]:
    """Return the paragraphs: problems, the lines that would pin the host, the table, what is not set."""
    wrong = [finding for finding in report.findings if finding.error is not None]
    parts = [_problem(finding, words) for finding in wrong]
    if report.pin_lines:
        parts += [words("doctor.pin"), fence("\n".join(report.pin_lines))]
    rows = [(MARKS[one.verdict], _subject(one, words), _said(one, words)) for one in report.findings]
    parts.append(table(("", words("doctor.looked_at"), words("summary.verdict")), rows))
    if report.unset:
        parts += [words("doctor.unset"), bullets(report.unset)]
    return parts


def _problem(finding: Finding, words: Words) -> str:
    """Return one problem as a paragraph: what, and what to do next."""
    assert finding.error is not None
    what, where, following = error_lines(finding.error, words.lang, see=words.see)
    subject = escape(_subject(finding, words))
    lines = [f"**{subject}** {escape(what)}", f"{escape(words('summary.where'))} {escape(where)}"]
    return "\n".join(f"> {line}  " for line in [*lines, f"**{words('summary.next')}** {escape(following)}"])


def _said(finding: Finding, words: Words) -> str:
    if finding.error is not None:
        return error_lines(finding.error, words.lang, see=words.see)[0]
    return words(finding.said, **{name: spoken(value, words.lang) for name, value in finding.values.items()})


def _subject(finding: Finding, words: Words) -> str:
    return str(spoken(subject_words(finding.subject), words.lang))
