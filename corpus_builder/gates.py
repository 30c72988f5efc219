"""The plan's gates: counts -> verdicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from corpus_builder.manifest import PASS, STOP, WARN, Gate
from corpus_builder.plan import EXPORTS, Plan
from corpus_builder.sources import SoulFiles


def judge_gates(
    plan: Plan, *, soul: Sequence[SoulFiles], samples: Mapping[str, int], rounds: Mapping[str, int], dialogs: int
) -> tuple[Gate, ...]:
    """Return the verdict of every gate that concerns one of the plan's sources.

    Args:
        soul: What was found of each soul source.
        samples: Samples per class.
        rounds: Questions with an answer, per file of dialogs that gave samples.
        dialogs: Dialogs that gave samples; a file of exports holds many.
    """
    kinds = {source.kind for source in plan.sources}
    found: list[Gate] = []
    if "soul" in kinds:
        found.append(_soul_gate(plan, soul))
    if "dialog" in kinds or any(isinstance(one, EXPORTS) and one.sample_class == "relation" for one in plan.sources):
        limits = plan.gates
        found += [
            _count_gate("relation", samples.get("relation", 0), stop=limits.relation_stop_below),
            _count_gate("relation_dialogs", dialogs, warn=limits.relation_warn_below),
            _rounds_gate(plan, rounds),
        ]
    total = sum(samples.values())
    return (*found, _count_gate("total", total, stop=plan.gates.total_stop_below, warn=plan.gates.total_warn_below))


def _count_gate(name: str, found: int, *, stop: int = 0, warn: int = 0) -> Gate:
    if found < stop:
        return Gate(name=name, verdict=STOP, found=found, wanted=stop)
    return Gate(name=name, verdict=WARN if found < warn else PASS, found=found, wanted=max(stop, warn))


def _soul_gate(plan: Plan, soul: Sequence[SoulFiles]) -> Gate:
    listed, found = sum(files.listed for files in soul), sum(files.found for files in soul)
    share = found / listed if listed else 1.0
    wanted = plan.gates.soul_files_found_share
    missing = tuple(path for files in soul for path in files.missing)
    return Gate(
        name="soul_files_found",
        verdict=PASS if share >= wanted else STOP,
        found=round(share, 4),
        wanted=round(wanted, 4),
        where=missing,
    )


def _rounds_gate(plan: Plan, rounds: Mapping[str, int]) -> Gate:
    wanted = plan.gates.dialog_rounds_warn_below
    short = tuple(path for path, count in rounds.items() if count < wanted)
    fewest = min(rounds.values(), default=0)
    return Gate(name="dialog_rounds", verdict=WARN if short else PASS, found=fewest, wanted=wanted, where=short)
