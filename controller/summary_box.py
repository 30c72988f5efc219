"""The machine's part of a setup's summary: what may trouble a run, and what the machine is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from controller.markdown import escape, number, table
from controller.reports import Notice
from controller.words import Words


def box(facts: Mapping[str, Any], notices: Iterable[Notice], words: Words) -> list[str]:
    """Return the paragraphs about the machine; none where nothing is known."""
    warnings = "\n".join(f"- ⚠️ {escape(words(f'machine.{notice.key}', **notice.values))}" for notice in notices)
    rows = [(words(f"summary.machine.{name}"), value) for name, value in _facts(facts, words) if value]
    if not rows and not warnings:
        return []
    return [f"### {words('summary.machine')}", warnings, table(("", ""), rows) if rows else ""]


def _facts(facts: Mapping[str, Any], words: Words) -> list[tuple[str, str]]:
    health, gpus = facts.get("health") or {}, facts.get("gpus")
    ram, shm, limits = health.get("ram"), health.get("shm"), health.get("limits") or {}
    shown_limits = [f"{name} {_limit(limits[name], words)}" for name in limits if limits[name] is not None]
    return [
        ("os", str(health.get("os") or "")),
        ("python", str(facts.get("python") or "")),
        ("tmux", str(facts.get("tmux") or "–") if facts else ""),
        ("gpus", _gpus(gpus)),
        ("driver", str(health.get("driver") or "")),
        ("ram", f"{number(ram['available_gib'])} / {number(ram['total_gib'])} GiB" if ram else ""),
        ("shm", f"{number(shm['free_gib'])} / {number(shm['total_gib'])} GiB" if shm else ""),
        ("limits", ", ".join(shown_limits)),
    ]


def _limit(value: int, words: Words) -> str:
    return words("summary.machine.unlimited") if value < 0 else number(value)


def _gpus(rows: list[Mapping[str, Any]] | None) -> str:
    """Return `4 × Tesla V100-SXM2-32GB`, kind by kind in the order of their first."""
    kinds: dict[str, int] = {}
    for row in rows or []:
        kinds[row["name"]] = kinds.get(row["name"], 0) + 1
    return ", ".join(f"{count} × {name}" for name, count in kinds.items())
