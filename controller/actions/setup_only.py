"""setup-only: facts, code, dialogs, environment, corpus, gates; starts no training.

What is wrong with the wish is found before the box is touched, what is wrong with the box before anything is sent.
The setup runs in its own session on the box; this page only starts it, or joins the same one, and follows.
Side effects: through the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from controller.box_health import clock_offset_s, find_notices, shown_facts
from controller.configuration import CODE_ROOT, Configuration, load_configuration
from controller.follow import LOST_CODES, Followed, ask_patiently, follow
from controller.inputs import MAX_WATCH_MINUTES
from controller.job import Job
from controller.objects import DialogSource, is_hosted, resolve_dialog
from controller.release import Release, gather
from controller.reports import SetupReport, Step, StepsReport
from controller.send_dialogs import send_dialogs
from corpus_builder.errors import ProjectError, Value
from corpus_builder.manifest import Manifest, manifest_from_json
from trainer.run_paths import new_run_id
from trainer.run_state import LOST, SUCCEEDED

if TYPE_CHECKING:
    from controller.box import Box

FACTS_TIMEOUT_S = 60
PUSH_TIMEOUT_S = 30 * 60
START_TIMEOUT_S = 120
MANIFEST_PATIENCE_S = 60.0
#: Errors of the corpus step: the manifest was written before them, so the summary can say the counts.
COUNTED = frozenset({"gate_failed", "zero_samples"})


@dataclass(frozen=True, slots=True)
class Sources:
    """What goes to the box: our code with the plan's sources, and where the dialogs come from (None: not needed)."""

    release: Release
    dialog: DialogSource | None


def run(box: Box, job: Job) -> SetupReport | StepsReport:
    """Set the box up and build the corpus; the report holds the counts also when a gate stops."""
    wish = load_configuration(job.inputs, job.environ)
    sources = gather_sources(job, wish)
    facts = ask_facts(box, job, wish, sources)
    if job.is_dry_run:
        return StepsReport(action=job.inputs.action, steps=setup_steps(job, wish, sources, facts))
    return set_up(box, job, wish, sources, facts)


def gather_sources(job: Job, wish: Configuration) -> Sources:
    """Return what goes to the box; a derived link is masked before anything could print it."""
    release = gather(CODE_ROOT, wish.sources_dir, wish.plan)
    if not wish.needs_dialogs:
        return Sources(release, None)
    dialog = resolve_dialog(job.inputs.dialog_zip, job.settings, is_on_hosted=is_hosted(job.environ))
    for value in dialog.masks():
        job.mask(value)
    return Sources(release, dialog)


def ask_facts(box: Box, job: Job, wish: Configuration, sources: Sources) -> dict[str, Any]:
    """Return what is known of the box, and as `notices` what may trouble a run; raise when it cannot do the job."""
    base_model_dir, dialog_path = wish.recipe.base_model_dir, sources.dialog.path if sources.dialog else None
    request = {
        **job.places,
        "base_model_dir": base_model_dir,
        "digest": sources.release.digest,
        "dialog_path": dialog_path,
        "dialog_source": sources.dialog.source_digest() if sources.dialog else None,
    }
    before = job.utc_now()
    facts = box.ask("facts", request, timeout_s=FACTS_TIMEOUT_S)
    offset_s = clock_offset_s(facts, before, job.utc_now())
    check_base_model(facts["base_model"], base_model_dir)
    if facts["dialog"] is not None and not facts["dialog"]["exists"]:
        raise ProjectError("dialog_zip_missing", path=str(dialog_path))
    if sources.dialog is not None:
        sources.dialog.check_expiry(has_archive=facts["dialog_archive"] and not job.inputs.is_zip_fresh)
    return {**facts, "notices": find_notices(facts, ranks=wish.recipe.ranks, clock_offset_s=offset_s)}


def check_base_model(found: dict[str, Any], path: str) -> None:
    """Raise when the base model is missing or not whole. Pure."""
    if not found["exists"]:
        raise ProjectError("base_model_missing", path=path)
    if found.get("adapter"):
        raise ProjectError("base_model_is_adapter", path=path)
    if not found["config"]:
        raise ProjectError("base_model_no_config", path=path)
    if found["missing"]:
        raise ProjectError("base_model_incomplete", path=path, missing=", ".join(found["missing"]))
    if not found["tokenizer"]:
        raise ProjectError("tokenizer_missing", path=path)


def setup_steps(job: Job, wish: Configuration, sources: Sources, facts: dict[str, Any]) -> tuple[Step, ...]:
    """Return what a setup would do, in order. Pure."""
    release, dialog = sources.release, sources.dialog
    files: dict[str, Value] = {"digest": release.digest, "files": len(release.files())}
    source: dict[str, Value] = {"source": dialog.shown if dialog else ""}
    sent = [dialog.file] if dialog and dialog.file else []
    tmux = [] if facts["tmux"] else [Step(key="install_tmux", values={}, is_needed=job.settings.allow_install)]
    return (
        Step(key="push_release", values=files, is_needed=not facts["release_present"]),
        *(Step(key="send_dialogs", values={"bytes": file.size}) for file in sent),
        *tmux,
        Step(key="fetch_dialogs", values=source, is_needed=dialog is not None),
        Step(key="environment", values={}),
        Step(key="smoke", values={}),
        Step(key="build_corpus", values={"plan": wish.plan.name}),
    )


def set_up(box: Box, job: Job, wish: Configuration, sources: Sources, facts: dict[str, Any]) -> SetupReport:
    """Send what is missing, start or join the setup, follow it, and report with the counts."""
    if not facts["release_present"]:
        push_release(box, job, sources.release)
    if sources.dialog is not None and sources.dialog.file is not None:
        send_dialogs(box, job, sources.dialog.file, is_fresh=job.inputs.is_zip_fresh)
    started = box.ask("start_setup", setup_request(job, wish, sources), timeout_s=START_TIMEOUT_S)
    followed = follow(box, job, kind="setup", work_id=started["setup_id"], deadline_s=60.0 * MAX_WATCH_MINUTES)
    error = setup_error(followed)
    gates = wish.plan.gates
    return SetupReport(
        action=job.inputs.action,
        setup_id=followed.id,
        state=followed.state,
        recipe=wish.recipe.name,
        plan=wish.plan.name,
        version=wish.recipe.version,
        expected={
            "soul_share": gates.soul_files_found_share,
            "relation": gates.relation_warn_below,
            "total": gates.total_warn_below,
        },
        is_attached=bool(started["attached"]),
        manifest=fetch_manifest(box, job) if error is None or error.code in COUNTED else None,
        elapsed_s=followed.elapsed_s,
        remedy=(followed.outcome or {}).get("remedy") if error is not None else None,
        box=shown_facts(facts),
        notices=facts["notices"],
        error=error,
    )


def push_release(box: Box, job: Job, release: Release) -> None:
    """Send our code and the plan's sources; the box checks every file's digest before it counts as there."""
    listing = {"root": job.settings.root, "digest": release.digest, "files": release.files()}
    box.ask("receive_release", listing, timeout_s=PUSH_TIMEOUT_S, stream=release.stream())


def setup_request(job: Job, wish: Configuration, sources: Sources) -> dict[str, Any]:
    """Return the arguments of `start_setup`. Pure but for the id, which holds the time."""
    dialog = sources.dialog
    return {
        **job.places,
        **job.audit,
        "digest": sources.release.digest,
        "setup_id": new_run_id(job.utc_now()),
        "lang": job.lang,
        "python": job.mother_python,
        "plan": wish.plan_json(),
        "recipe": wish.recipe_json(),
        "suite": wish.suite_json(),
        "dialog": {**dialog.request(), "fresh": job.inputs.is_zip_fresh} if dialog else {"kind": "none"},
        "env": job.settings.mirrors(),
        "secrets": dialog.secrets() if dialog else {},
        "allow_install": job.settings.allow_install,
        "fetch_allow": allowed_hosts(job.settings.fetch_allow, dialog),
    }


def allowed_hosts(hosts: Sequence[str], dialog: DialogSource | None) -> list[str]:
    """Return what the box may fetch from: listed hosts, and the port of a plain-http link to one of them. Pure.

    A listed host may be private; that one link, and no other port of the host, may be plain http too.
    """
    if dialog is None or dialog.url is None:
        return list(hosts)
    allowed, link = [*hosts, *dialog.allow], urlsplit(dialog.url)
    if link.scheme == "http" and link.hostname in allowed:
        allowed.append(f"{link.hostname}:{link.port or 80}")
    return list(dict.fromkeys(allowed))


def setup_error(followed: Followed) -> ProjectError | None:
    """Return why the setup did not succeed, None when it did. Pure."""
    if followed.state == SUCCEEDED:
        return None
    if not followed.has_ended:
        minutes = round(followed.elapsed_s / 60)
        return ProjectError("deadline_passed", state=followed.state, minutes=minutes, name=f"setup {followed.id}")
    if followed.error is not None:
        return followed.error
    if followed.state == LOST:
        return ProjectError("session_vanished", name=f"setup {followed.id}")
    outcome = followed.outcome or {}
    exit_code = outcome.get("exit_code")
    return ProjectError(
        "setup_failed",
        step=str(outcome.get("reason") or followed.state),
        exit_code="-" if exit_code is None else exit_code,
        name=f"setup {followed.id}",
    )


def fetch_manifest(box: Box, job: Job) -> Manifest | None:
    """Return the manifest on the box; None when there is none, or when the link stays gone: that hides no result."""
    give_up = job.clock() + MANIFEST_PATIENCE_S
    try:
        packed = ask_patiently(box, job, "manifest", {"data": job.settings.data}, give_up=give_up)["manifest"]
    except ProjectError as error:
        if error.code not in LOST_CODES:
            raise
        return None
    return None if packed is None else manifest_from_json(packed)
