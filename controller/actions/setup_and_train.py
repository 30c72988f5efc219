"""setup-and-train: setup-only, then a run, watched for as long as the person wants.

Not confirmed, or a run at work: refused before anything is sent. The run lives in its own session on the box; the
deadline ends the watching and never the run. Side effects: through the box.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controller.actions import setup_only
from controller.configuration import Configuration, load_configuration
from controller.follow import LOST_CODES, Followed, follow
from controller.inputs import MAX_WATCH_MINUTES
from controller.job import Job
from controller.reports import SetupReport, Step, StepsReport, TrainReport
from controller.settings import POWEROFF
from corpus_builder.errors import ProjectError, Value
from corpus_builder.manifest import check_gates
from corpus_builder.say import say
from trainer.run_paths import new_run_id
from trainer.run_state import LOST, STARTING, SUCCEEDED

if TYPE_CHECKING:
    from controller.box import Box

START_TIMEOUT_S = 120
STATUS_TIMEOUT_S = 60


def run(box: Box, job: Job) -> TrainReport | SetupReport | StepsReport:
    """Set up, check the gates, start a run and watch it; a setup that fails is reported as such."""
    began = job.clock()
    if not job.inputs.is_confirmed and not job.is_dry_run:
        raise ProjectError("not_confirmed", action=job.inputs.action)
    wish = load_configuration(job.inputs, job.environ)
    sources = setup_only.gather_sources(job, wish)
    facts = setup_only.ask_facts(box, job, wish, sources)
    check_no_run(facts)
    if job.is_dry_run:
        steps = setup_only.setup_steps(job, wish, sources, facts)
        return StepsReport(action=job.inputs.action, steps=(*steps, start_step(job, wish), *end_steps(job)))

    setup = setup_only.set_up(box, job, wish, sources, facts)
    if setup.error is not None:
        return replace(setup, error=red_error(setup.error, setup.setup_id))
    manifest = setup.manifest
    if manifest is None:  # the setup succeeded, but the link broke before the counts came
        raise ProjectError("connection_lost", host=box.name, reason="reason.no_manifest")
    check_gates(manifest)

    run_id = start_run(box, job, wish, sources.release.digest, manifest.samples_sha256)
    if job.inputs.watch_minutes == 0:
        return TrainReport(
            action=job.inputs.action, setup=setup, run_id=run_id, version=wish.recipe.version, state=STARTING
        )
    minutes_left = MAX_WATCH_MINUTES - (job.clock() - began) / 60
    deadline_s = 60 * max(0.0, min(job.inputs.watch_minutes, minutes_left))
    followed = follow(box, job, kind="train", work_id=run_id, deadline_s=deadline_s)
    return TrainReport(
        action=job.inputs.action,
        setup=setup,
        run_id=run_id,
        version=wish.recipe.version,
        state=followed.state,
        points=followed.points,
        eta_s=followed.eta_s,
        remedy=_remedy(followed),
        checkpoints=_checkpoints(box, job),
        watched_s=followed.elapsed_s,
        preflight=followed.preflight,
        error=run_error(followed, lang=job.lang),
    )


def check_no_run(facts: dict[str, Any]) -> None:
    """Raise `lock_held`, naming it, when a run is at work. Pure."""
    lock = facts["locks"]["run"]
    if lock is not None:
        raise ProjectError("lock_held", action=lock["action"], name=lock["name"], owner=lock["owner"])


def red_error(error: ProjectError, setup_id: str) -> ProjectError:
    """Return why no training was started. A setup that outlasts the deadline goes on; a training would not. Pure."""
    if error.code != "deadline_passed":
        return error
    return ProjectError("training_not_started", name=f"setup {setup_id}")


def start_step(job: Job, wish: Configuration) -> Step:
    """Return the last step of a dry run. Pure."""
    values: dict[str, Value] = {
        "recipe": wish.recipe.name,
        "version": wish.recipe.version,
        "gpus": wish.recipe.ranks,
        "minutes": job.inputs.watch_minutes,
    }
    return Step(key="start_run", values=values)


def end_steps(job: Job) -> tuple[Step, ...]:
    """Return what a dry run says of the time after the run. Pure."""
    wish = job.settings.on_end
    if wish is None:
        return ()
    return (Step(key="power_off" if wish == POWEROFF else "end_command", values={}),)


def start_run(box: Box, job: Job, wish: Configuration, digest: str, samples_sha256: str) -> str:
    """Start the run in its session and return its id; refused if the samples are no longer those of the summary."""
    request = {
        **job.places,
        **job.audit,
        "digest": digest,
        "samples_sha256": samples_sha256,
        "run_id": new_run_id(job.utc_now()),
        "version": wish.recipe.version,
        "recipe": wish.recipe_json(),
        "origins": wish.origins,
        "python": job.mother_python,
        "env": job.settings.mirrors(),
        "secrets": job.settings.tracker_tokens(wish.recipe.report_to),
        "grace_s": job.grace_s,
        "on_end": job.settings.on_end,
    }
    return str(box.ask("start_train", request, timeout_s=START_TIMEOUT_S)["run_id"])


def run_error(followed: Followed, *, lang: str) -> ProjectError | None:
    """Return why the run did not succeed, None when it did; a known failure says its remedy. Pure."""
    name = f"run {followed.id}"
    if followed.state == SUCCEEDED:
        return None
    if not followed.has_ended:
        minutes = round(followed.elapsed_s / 60)
        return ProjectError("deadline_passed", state=followed.state, minutes=minutes, name=name)
    if followed.error is not None:
        return followed.error
    if followed.state == LOST:
        return ProjectError("session_vanished", name=name)
    remedy = _remedy(followed)
    reason = say(f"remedy.{remedy}", lang) if remedy else str((followed.outcome or {}).get("reason", ""))
    return ProjectError("run_failed", state=followed.state, reason=reason, name=name)


def _remedy(followed: Followed) -> str | None:
    remedy = (followed.outcome or {}).get("remedy")
    return None if remedy is None else str(remedy)


def _checkpoints(box: Box, job: Job) -> tuple[dict[str, Any], ...]:
    """Return the checkpoints on the box; none where the link is gone, so that it never hides how the run ended."""
    try:
        return tuple(box.ask("status", job.places, timeout_s=STATUS_TIMEOUT_S)["checkpoints"])
    except ProjectError as error:
        if error.code not in LOST_CODES:
            raise
        return ()
