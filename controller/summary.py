"""Reports -> Markdown of the step summary, in Chinese or English. Pure.

Values that the reader may not see appear as `#a3f2` (design 4.9); text that a person wrote never appears, except in
the tail of a log whose reader may see it, where the box has already decided line by line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controller.markdown import duration, escape, fence, number, table
from controller.reports import (
    DoctorReport,
    KillReport,
    Report,
    SetupReport,
    StatusReport,
    Step,
    StepsReport,
    TailReport,
    TrainReport,
)
from controller.summary_box import box
from controller.summary_corpus import corpus
from controller.summary_doctor import doctor
from controller.summary_learning import held_out, learning_facts, learning_of
from controller.summary_status import status
from controller.words import Words
from corpus_builder.errors import EXIT_DEADLINE, EXIT_DONE, ProjectError
from corpus_builder.say import error_lines


def as_markdown(report: Report, *, lang: str, see: frozenset[str]) -> str:
    """Return the summary of a report."""
    words = Words(lang, see)
    parts = [_head(report, words)]
    if report.error is not None:
        parts.append(error_block(report.error, words))
    if isinstance(report, StepsReport):
        parts += [words("summary.dry_run"), *step_lines(report.steps, words)]
    elif isinstance(report, SetupReport):
        parts += _setup(report, words)
    elif isinstance(report, TrainReport):
        parts += _train(report, words)
    elif isinstance(report, StatusReport):
        parts += status(report, words)
    elif isinstance(report, TailReport):
        parts += _tail(report, words)
    elif isinstance(report, DoctorReport):
        parts += doctor(report, words)
    else:
        parts += _kill(report, words)
    return "\n\n".join(part for part in parts if part) + "\n"


def error_as_markdown(action: str, error: ProjectError, *, lang: str, see: frozenset[str]) -> str:
    """Return the summary of an action that never began."""
    words = Words(lang, see)
    return f"## ❌ {escape(action)}\n\n{error_block(error, words)}\n"


def error_block(error: ProjectError, words: Words) -> str:
    """Return the three lines of an error."""
    lines = error_lines(error, words.lang, see=words.see)
    labels = (words("summary.what"), words("summary.where"), words("summary.next"))
    return "\n".join(f"> **{label}** {escape(line)}  " for label, line in zip(labels, lines, strict=True))


def step_lines(steps: Iterable[Step], words: Words) -> list[str]:
    """Return the steps of a dry run, numbered; a step that is not needed says why."""
    said = [words(f"step.{step.key}" if step.is_needed else f"step.{step.key}.not", **step.values) for step in steps]
    return ["\n".join(f"{place}. {escape(line)}" for place, line in enumerate(said, 1)) or words("step.nothing")]


def _head(report: Report, words: Words) -> str:
    exit_code = EXIT_DONE if report.error is None else report.error.exit_code
    mark = {EXIT_DONE: "✅", EXIT_DEADLINE: "⏳"}.get(exit_code, "❌")
    state = getattr(report, "state", None)
    return f"## {mark} {escape(report.action)}" + (f" · {words.state(state)}" if state else "")


def _setup(report: SetupReport, words: Words) -> list[str]:
    facts = [
        (words("summary.setup"), report.setup_id + (f" ({words('summary.attached')})" if report.is_attached else "")),
        (words("summary.recipe"), f"{report.recipe} → {report.version}"),
        (words("summary.plan"), report.plan),
        (words("summary.took"), duration(report.elapsed_s)),
    ]
    parts = [_remedy(report.remedy, words), table(("", ""), facts)]
    if report.manifest is not None:
        parts += corpus(report.manifest, report.expected, words)
    parts += box(report.box, report.notices, words)
    if report.error is None:
        parts.append(words("summary.after_setup"))
    return parts


def _remedy(code: str | None, words: Words) -> str:
    """Return what a known failure is and what helps; a newer box may know one that we don't."""
    return "" if code is None else f"> {escape(words.or_itself('remedy', code))}"


def _train(report: TrainReport, words: Words) -> list[str]:
    parts = [table(("", ""), _train_facts(report, words))]
    if report.preflight:
        parts += [f"### {words('summary.preflight')}", table(("", ""), _preflight(report.preflight, words))]
    if report.points:
        parts += [_losses(report, words), *held_out(learning_of(report.points), words)]
    if report.checkpoints:
        head = (words("summary.checkpoint"), "GiB", words("summary.complete"))
        rows = [(item["path"], number(item.get("gib")), _tick(item.get("complete"))) for item in report.checkpoints]
        parts += [f"### {words('summary.checkpoints')}", table(head, rows)]
    parts.append(_remedy(report.remedy, words))
    if report.setup.manifest is not None:
        parts += corpus(report.setup.manifest, report.setup.expected, words)
    parts += box(report.setup.box, report.setup.notices, words)
    if report.error is None and not report.points and report.state == "starting":
        parts.append(words("summary.started"))
    return parts


def _train_facts(report: TrainReport, words: Words) -> list[tuple[str, str]]:
    last = report.points[-1] if report.points else None
    facts = [
        (words("summary.run"), report.run_id),
        (words("summary.version"), report.version),
        (words("summary.state"), words.state(report.state)),
        (words("summary.watched"), duration(report.watched_s)),
    ]
    if last is not None:
        facts += [
            (words("summary.step"), f"{number(last.step)} / {number(last.total)}"),
            (words("summary.epoch"), f"{last.epoch:g} / {last.total_epochs:g}"),
            (words("summary.lr"), "–" if last.lr is None else f"{last.lr:.3g}"),
            (words("summary.samples_per_second"), number(last.thr)),
        ]
    if report.eta_s is not None:
        facts.append((words("summary.eta"), duration(report.eta_s)))
    return facts + learning_facts(learning_of(report.points), words)


def _preflight(told: Mapping[str, str], words: Words) -> list[tuple[str, str]]:
    """Return what a run expected of itself before it began; what it did not know is a dash."""

    def value(key: str, unit: str) -> str:
        return "–" if told.get(key, "unknown") == "unknown" else f"{told[key]} {unit}".strip()

    facts = [
        (words("summary.preflight.gpu"), value("gpu_gib", "GiB")),
        (words("summary.preflight.host"), value("host_gib", "GiB")),
        (words("summary.preflight.disk"), value("disk_gib", "GiB")),
        (words("summary.preflight.steps"), value("steps", "")),
        (words("summary.preflight.views"), value("views", "")),
        (words("summary.preflight.minutes"), value("minutes", "")),
    ]
    basis = told.get("basis", "unknown")
    return [*facts, (words("summary.preflight.basis"), words.or_itself("preflight.basis", basis))]


def _losses(report: TrainReport, words: Words) -> str:
    """Return the loss, all and by class: as first seen, and as last seen. A step need not hold every class."""
    first, last = report.points[0], report.points[-1]
    rows = [(words("summary.all_classes"), _loss(first.loss), _loss(last.loss))]
    keys = {key for point in report.points for key in point.extras if key.startswith("loss_")}
    for key in sorted(keys - {"loss_raw"}):
        seen = [point.extras[key] for point in report.points if key in point.extras]
        rows.append((words.sample_class(key[len("loss_") :]), _loss(seen[0]), _loss(seen[-1])))
    head = (words("summary.loss"), words("summary.first", step=first.step), words("summary.last", step=last.step))
    return table(head, rows)


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _tick(is_true: object) -> str:
    return "✅" if is_true else "–"


def _tail(report: TailReport, words: Words) -> list[str]:
    if not report.log_id and not report.text:
        return [words("summary.no_log")]
    shown = words("summary.tail", name=report.log_id, start=report.from_offset, size=report.size)
    hidden = words("summary.hidden", count=report.hidden_lines) if report.hidden_lines else ""
    change = words(f"log.{report.log_change}") if report.log_change else ""
    on = words("summary.read_on", cursor=report.cursor)
    return [escape(shown), escape(change), escape(hidden), fence(report.text) if report.text.strip() else "", on]


def _kill(report: KillReport, words: Words) -> list[str]:
    if not report.ended:
        return [words("summary.nothing_to_kill")]
    rows = [(words.kind(item["kind"]), item["id"], words.state(item["state"])) for item in report.ended]
    head = (words("summary.kind"), "id", words("summary.state"))
    forced = words("summary.forced") if report.was_forced else ""
    gone = words("summary.gone") if report.alive == 0 else ""
    audited = "" if report.was_audited else words("summary.not_audited")
    return [table(head, rows), forced, gone, _gpus_after(report, words), audited]


def _gpus_after(report: KillReport, words: Words) -> str:
    """Return what became of the memory of GPUs; a summary says of none that it is held, the error does."""
    if report.gpus is None:
        return words("summary.gpus_unknown")
    return words("summary.gpus_free") if report.has_gpus and not report.gpus else ""
