"""Facts about a run -> its state. Pure.

Runs on the box too: standard library and Python 3.8 only. No wall clock decides who is alive: a process is
told by pid, start ticks and boot id; ages are differences of one clock of the box.
"""

from dataclasses import dataclass
from typing import Any, Dict, Optional

STARTING, RUNNING, STALLED = "starting", "running", "stalled"
INTERRUPTED, SUCCEEDED, FAILED, KILLED, LOST = "interrupted", "succeeded", "failed", "killed", "lost"
LIVE_STATES = (STARTING, RUNNING, STALLED)
END_STATES = (INTERRUPTED, SUCCEEDED, FAILED, KILLED, LOST)
STATES = LIVE_STATES + END_STATES

#: A 7B load and the JIT builds of DeepSpeed's kernels come before the first step (design 4.4).
STARTING_FLOOR_S = 30 * 60
#: A step, its checkpoint and its evaluation may take this many times the run's own step time.
STALL_FACTOR = 20
STALL_FLOOR_S = 10 * 60


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `outcome.json`. `signal` is the number that ended the process, `exit_code` its code."""

    state: str
    exit_code: Optional[int]
    signal: Optional[int]
    reason: str
    last_step: int
    ended_at: str
    remedy: Optional[str] = None
    error: Optional[Dict[str, Any]] = None  # a ProjectError's JSON, where a step told why it ended

    def __post_init__(self) -> None:
        if self.state not in END_STATES:
            raise ValueError("a run cannot end in state %r" % self.state)


@dataclass(frozen=True)
class RunFacts:
    """What can be known of a run.

    `outcome`: parsed `outcome.json`, or None. `supervisor_alive`: exactly that process runs. `last_step`: of the
    newest progress line, 0 before. `silent_s`: seconds since the last sign of life (progress, event or start).
    `step_s`: the run's own seconds per step, None before two progress lines.
    """

    outcome: Optional[Outcome]
    supervisor_alive: bool
    last_step: int
    silent_s: float
    step_s: Optional[float]


def derive_state(facts: RunFacts) -> str:
    """Return one of STATES."""
    if facts.outcome is not None:
        return facts.outcome.state
    if not facts.supervisor_alive:
        return LOST
    if facts.last_step == 0:
        return STARTING if facts.silent_s < STARTING_FLOOR_S else STALLED
    patience_s = max(STALL_FLOOR_S, STALL_FACTOR * (facts.step_s or 0.0))
    return RUNNING if facts.silent_s < patience_s else STALLED


def has_ended(state: str) -> bool:
    """Whether nothing more will happen in this attempt."""
    return state in END_STATES


def eta_s(last_step: int, total_steps: int, step_s: Optional[float]) -> Optional[float]:
    """Return the seconds left by this attempt's own step time; None when it is not known yet."""
    return None if step_s is None or total_steps <= 0 else max(0, total_steps - last_step) * step_s


def outcome_from_json(packed: Dict[str, Any]) -> Outcome:
    """Return the outcome of `outcome.json`'s values; unknown keys of a newer writer are ignored."""
    known = {key: packed.get(key) for key in Outcome.__dataclass_fields__}
    return Outcome(**known)  # type: ignore[arg-type]
