"""What a look at one thing found, in four verdicts. Pure."""

from __future__ import annotations

from controller.reports import Finding
from corpus_builder.errors import ProjectError, Value


def ok(subject: str, said: str, /, **values: Value) -> Finding:
    """Return that something is well."""
    return Finding(subject=subject, verdict="ok", said=said, values=values)


def note(subject: str, said: str, /, **values: Value) -> Finding:
    """Return something to know that stops nothing."""
    return Finding(subject=subject, verdict="note", said=said, values=values)


def untried(subject: str) -> Finding:
    """Return that something could not be tried, because something before it is wrong."""
    return Finding(subject=subject, verdict="untried", said="doctor.untried")


def wrong(subject: str, error: ProjectError) -> Finding:
    """Return what is wrong."""
    return Finding(subject=subject, verdict="wrong", error=error)


def subject_words(subject: str) -> str:
    """Return what a finding is about, as values of an error have it: a setting's name, or a key of the catalogues."""
    return "reason.{}".format(f"subject_{subject}") if subject.islower() else subject
