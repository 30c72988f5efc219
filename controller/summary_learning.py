"""The part of a summary that says how a run learns: its curve, its held-out losses, skipped steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.markdown import number, table
from controller.words import Words
from trainer.curve import TOO_SHORT, describe_learning
from trainer.progress import Progress


def learning_of(points: Sequence[Progress]) -> dict[str, Any]:
    """Return what the progress lines of a run tell of its learning."""
    return describe_learning([(point.step, point.loss, point.extras) for point in points])


def learning_facts(told: Mapping[str, Any], words: Words) -> list[tuple[str, str]]:
    """Return rows for a table of facts: the verdict on the curve, and skipped steps where there are any.

    Args:
        told: What `describe_learning` returned, here or on the box; of an older box, keys may be missing.
    """
    facts = []
    if told.get("curve", TOO_SHORT) != TOO_SHORT:
        facts.append((words("summary.curve"), words.or_itself("curve", told["curve"])))
    if told.get("skipped"):
        facts.append((words("summary.skipped_steps"), number(told["skipped"])))
    return facts


def held_out(told: Mapping[str, Any], words: Words) -> list[str]:
    """Return the table of held-out losses, first, lowest and last; nothing where nobody looked."""
    looks = told.get("held_out")
    if not looks:
        return []
    first, best, last = (looks[name] for name in ("first", "best", "last"))
    head = (
        words("summary.held_out"),
        words("summary.first", step=first["step"]),
        words("summary.lowest", step=best["step"]),
        words("summary.last", step=last["step"]),
    )
    names = ["all", *sorted({name for look in (first, best, last) for name in look["losses"]} - {"all"})]
    rows = [
        (
            words("summary.all_classes") if name == "all" else words.sample_class(name),
            *(_loss(look["losses"].get(name)) for look in (first, best, last)),
        )
        for name in names
    ]
    return [table(head, rows)]


def _loss(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "–"
