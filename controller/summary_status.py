"""The status part of a summary: the run, the setup, checkpoints, GPUs, disks, locks, names of secrets. Pure."""

from __future__ import annotations

from typing import Any

from controller.markdown import bullets, duration, number, table
from controller.reports import StatusReport
from controller.summary_learning import held_out, learning_facts
from controller.words import Words
from corpus_builder.errors import Named, ProjectError
from corpus_builder.say import error_lines

_FACTS = ("id", "version", "attempt", "started_at")


def status(report: StatusReport, words: Words) -> list[str]:
    """Return the paragraphs about a box."""
    answer = report.status
    parts = [words("summary.box", name=Named(report.box))]
    parts += _work("run", answer["run"], words)
    parts += _work("setup", answer["setup"], words)
    parts += _checkpoints(answer["checkpoints"], words)
    parts += _gpus(answer["gpus"], words)
    parts += _disks(answer["disks"], words)
    parts += _locks(answer["locks"], words)
    if answer.get("secrets"):
        parts += [f"### {words('summary.secrets')}", bullets(answer["secrets"])]
    return parts


def _work(kind: str, item: dict[str, Any] | None, words: Words) -> list[str]:
    title = f"### {words(f'summary.{kind}')}"
    if item is None:
        return [title, words("summary.none_yet")]
    rows = [(words.or_itself("summary", key), item[key]) for key in _FACTS if item.get(key) is not None]
    rows.insert(1, (words("summary.state"), words.state(item["state"])))
    if item.get("step_name"):
        rows.append((words("summary.step"), item["step_name"]))
    if item.get("total"):
        rows.append((words("summary.step"), f"{number(item.get('last_step') or 0)} / {number(item['total'])}"))
    rows += [(name, f"{value:.4f}") for name, value in _losses(item, words)]
    if item.get("eta_s") is not None:
        rows.append((words("summary.eta"), duration(item["eta_s"])))
    told = item.get("learning") or {}
    rows += learning_facts(told, words)
    parts = [title, table(("", ""), rows), *held_out(told, words)]
    if item.get("error"):
        parts.append(bullets(error_lines(ProjectError.from_json(item["error"]), words.lang, see=words.see)))
    if item.get("remedy"):
        parts.append(bullets([words.or_itself("remedy", item["remedy"])]))
    return parts


def _losses(item: dict[str, Any], words: Words) -> list[tuple[str, float]]:
    """Return the losses with their names: all, then by class; `raw` is the unweighted one and only for `--json`."""
    named = [(words("summary.loss"), item.get("loss"))]
    for name, value in sorted((item.get("losses") or {}).items()):
        if name != "raw":
            named.append((f"{words('summary.loss')} · {words.sample_class(name)}", value))
    return [(name, float(value)) for name, value in named if value is not None]


def _checkpoints(items: list[dict[str, Any]], words: Words) -> list[str]:
    if not items:
        return []
    head = (words("summary.checkpoint"), words("summary.step"), "GiB", words("summary.complete"))
    rows = [
        (item["path"], number(item.get("step")), number(item.get("gib")), "✅" if item.get("complete") else "–")
        for item in items
    ]
    return [f"### {words('summary.checkpoints')}", table(head, rows)]


def _gpus(gpus: list[dict[str, Any]] | None, words: Words) -> list[str]:
    if not gpus:
        return [words("summary.no_gpu")]
    head = ("GPU", words("summary.memory"), words("summary.utilization"))
    rows = [
        (
            f"{gpu['index']} {gpu['name']}",
            f"{number(gpu.get('used_mib'))} / {number(gpu.get('memory_mib'))} MiB",
            "–" if gpu.get("utilization") is None else f"{gpu['utilization']} %",
        )
        for gpu in gpus
    ]
    return [table(head, rows)]


def _disks(disks: dict[str, dict[str, float]], words: Words) -> list[str]:
    head = (words("summary.disk"), words("summary.free"), words("summary.size"))
    rows = [(path, f"{disk['free_gib']:.1f} GiB", f"{disk['total_gib']:.1f} GiB") for path, disk in disks.items()]
    return [table(head, rows)] if rows else []


def _locks(locks: dict[str, dict[str, Any] | None], words: Words) -> list[str]:
    held = [lock for lock in locks.values() if lock is not None]
    return [bullets(words("lock_held.what", **_known(lock)) for lock in held)] if held else []


def _known(lock: dict[str, Any]) -> dict[str, str]:
    return {key: str(lock[key]) for key in ("action", "name", "owner")}
