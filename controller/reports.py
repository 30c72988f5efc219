"""What each action found or did, as values: the summary, `--json` and the exit code are made of these. Pure.

An action that ends badly after it has learnt something still returns its report, with the error in it, so that the
summary can say the counts; an action that never began raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from corpus_builder.errors import NAMED, Named, ProjectError, Value, privacy_class
from corpus_builder.manifest import Manifest, manifest_to_json
from corpus_builder.say import shown
from trainer.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a page: `key` is said by the catalogues (`step.<key>`); one that is not needed says why not."""

    key: str
    values: Mapping[str, Value]
    is_needed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something of a machine that may trouble a run: `key` is said by the catalogues (`machine.<key>`)."""

    key: str
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsReport:
    """A dry run: what would be done, in order, and why."""

    action: str
    steps: tuple[Step, ...]
    error: ProjectError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupReport:
    """One setup, followed to its end or to the deadline. `manifest` is None where no corpus was built.

    `remedy`: the known failure that ended it (trainer/remedies.py); `box`: what the machine is (controller/
    box_health.py), `notices`: what of it may trouble a run.
    """

    action: str
    setup_id: str
    state: str
    recipe: str
    plan: str
    version: str
    expected: dict[str, float]  # what the plan's gates ask for: relation, total, soul_share
    is_attached: bool = False
    manifest: Manifest | None = None
    elapsed_s: float = 0.0
    remedy: str | None = None
    box: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    error: ProjectError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """One run, watched to its end or to the deadline.

    `points` are the progress lines seen while watching; `preflight` what the run expected before it began: gpu_gib,
    host_gib, disk_gib, steps, views, minutes, basis (trainer/room.py); empty where its line was not seen.
    """

    action: str
    setup: SetupReport
    run_id: str
    version: str
    state: str
    points: tuple[Progress, ...] = ()
    eta_s: float | None = None
    remedy: str | None = None
    checkpoints: tuple[dict[str, Any], ...] = ()
    watched_s: float = 0.0
    preflight: Mapping[str, str] = field(default_factory=dict)
    error: ProjectError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """The box's own answer (`status`), and its name."""

    action: str
    box: str
    status: dict[str, Any]
    error: ProjectError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TailReport:
    """Part of a log, as much of it as the reader may see; `text` is empty where it was followed.

    `cursor`: what to give to `--from-offset` to read on, `next_offset` the byte in it. `log_change`: why the log was
    not read on where the cursor said: truncated, rotated, replaced. `state`: of the run or setup whose log it is.
    """

    action: str
    log_id: str
    text: str
    size: int
    from_offset: int
    hidden_lines: int
    next_offset: int = 0
    cursor: str = ""
    log_change: str | None = None
    state: str | None = None
    error: ProjectError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KillReport:
    """What was ended. `was_forced`: it did not end by itself within the grace.

    `gpus`: where memory is still held, `{"index", "used_mib", "pids"}`; None where nvidia-smi could not be asked,
    and where there is none and nothing was ended, empty. `was_audited`: the disk had room for who did it.
    """

    action: str
    ended: tuple[dict[str, Any], ...]
    alive: int
    was_forced: bool = False
    gpus: tuple[dict[str, Any], ...] | None = ()
    has_gpus: bool = False
    was_audited: bool = True
    error: ProjectError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the doctor looked at. `said` is a sentence of the catalogues; `error` says what is wrong.

    `subject` is the name of a setting, or a word (`subject.login`). `verdict`: ok, note, wrong or untried.
    """

    subject: str
    verdict: str
    said: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    error: ProjectError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Everything that was looked at. `pin_lines`: what the host shows, and nobody has vouched for; `unset`: names."""

    action: str
    findings: tuple[Finding, ...]
    pin_lines: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    error: ProjectError | None = None


Report = DoctorReport | StepsReport | SetupReport | TrainReport | StatusReport | TailReport | KillReport


def report_to_json(report: Report, see: frozenset[str]) -> dict[str, Any]:
    """Return a report as JSON values, for `--json`; what `see` does not allow is hashed or left out."""
    return _fields(report, see)


def _fields(value: Report | Finding, see: frozenset[str]) -> dict[str, Any]:
    return {name: _plain(getattr(value, name), see) for name in value.__dataclass_fields__}


def _plain(value: Any, see: frozenset[str]) -> Any:
    if isinstance(value, ProjectError):
        values = {key: item if privacy_class(item) in see else shown(item, see) for key, item in value.values.items()}
        return {"code": value.code, "values": values, "exit_code": value.exit_code}
    if isinstance(value, Manifest):
        return _manifest_json(value, see)
    if isinstance(value, Finding):
        seen = {key: item if privacy_class(item) in see else shown(item, see) for key, item in value.values.items()}
        return {**_fields(value, see), "values": seen}
    if isinstance(value, SetupReport):
        return report_to_json(value, see)
    if isinstance(value, Progress | Step | Notice):
        return asdict(value)
    return [_plain(item, see) for item in value] if isinstance(value, tuple) else value


def _manifest_json(manifest: Manifest, see: frozenset[str]) -> dict[str, Any]:
    """Return the manifest; without the names of files where those may not be seen."""
    packed = manifest_to_json(manifest)
    if NAMED in see:
        return packed
    for item in packed["files"]:
        item["path"] = shown(Named(item["path"]), see)
    for gate in packed["gates"]:
        gate["where"] = [shown(Named(name), see) for name in gate["where"]]
    return packed
