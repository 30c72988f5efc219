"""doctor: every secret and setting tried alone, all problems at once, each with its next step; changes nothing.

Takes no lock and needs no confirmation; works with half of the settings missing. What a host shows before anything is
pinned is printed and never trusted: nothing is sent to it. Side effects: network; asks the box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from controller.actions.setup_only import FACTS_TIMEOUT_S, allowed_hosts, check_base_model
from controller.box_health import clock_offset_s, find_notices
from controller.configuration import Configuration, load_configuration
from controller.findings import note, ok, subject_words, untried, wrong
from controller.job import Job
from controller.markdown import duration, number
from controller.objects import SECRET, DialogSource, is_hosted, resolve_dialog
from controller.reports import DoctorReport, Finding, StepsReport
from controller.settings import SETTINGS, Settings
from controller.storage_probe import probe
from corpus_builder.errors import EXIT_INPUT, EXIT_UNFIT, EXIT_UNREACHABLE, ProjectError

if TYPE_CHECKING:
    from controller.box import Box

#: The codes that name the worst of what was found; the others are in the report.
WORST = {EXIT_INPUT: "doctor_inputs", EXIT_UNREACHABLE: "doctor_unreachable", EXIT_UNFIT: "doctor_unfit"}
#: The box answered these, so whoever asked was logged in.
ANSWERED = frozenset({"box_no_python", "answer_unreadable"})
NEEDED = frozenset({"ZY_GPU_HOST", "ZY_GPU_USER", "ZY_GPU_KEY", "ZY_GPU_KNOWN_HOSTS"})
ADDRESSES = ("PIP_INDEX_URL", "HF_ENDPOINT", "AWS_ENDPOINT_URL")
SOON_S = 3600  # a link that ends sooner may end before the machine has fetched


def run(open_box: Callable[[], Box], job: Job) -> DoctorReport | StepsReport:
    """Look at everything and report; `open_box` is called once the way to the box is known to be right."""
    if job.is_dry_run:
        return StepsReport(action=job.inputs.action, steps=())
    findings = [
        wrong(name, ProjectError("setting_invalid", name=name, reason=reason))
        for name, reason in job.setting_faults.items()
    ]
    wish = _attempt("recipe", findings, lambda: load_configuration(job.inputs, job.environ))
    dialog = _dialog(job, wish, findings)
    pin_lines: list[str] = []
    if job.is_local:
        is_way_open = True
    else:
        from controller.way import examine_way  # brings paramiko: not needed for this machine

        way, pin_lines, is_way_open = examine_way(job)
        findings += way
    findings += _box(open_box, job, wish, dialog) if is_way_open else [untried("login")]
    findings += [*_storage_keys(job.settings, dialog), *_link(job, dialog), *_addresses(job)]
    return DoctorReport(
        action=job.inputs.action,
        findings=tuple(findings),
        pin_lines=tuple(pin_lines),
        unset=_unset(job),
        error=_worst(findings),
    )


def _worst(findings: Sequence[Finding]) -> ProjectError | None:
    """Return the error of the whole: the highest exit code there is, and the names of all that is wrong."""
    found = [finding for finding in findings if finding.error is not None]
    if not found:
        return None
    exit_code = max(finding.error.exit_code for finding in found if finding.error)
    names = ", ".join(dict.fromkeys(subject_words(finding.subject) for finding in found))
    return ProjectError(WORST.get(exit_code, WORST[EXIT_UNFIT]), count=len(found), names=names)


def _attempt(subject: str, findings: list[Finding], look: Callable[[], Any]) -> Any:
    """Return what `look` returns; None, and a finding, where it raises."""
    try:
        return look()
    except ProjectError as error:
        findings.append(wrong(subject, error))
        return None


def _dialog(job: Job, wish: Configuration | None, findings: list[Finding]) -> DialogSource | None:
    """Return where the dialogs come from; None where the plan needs none, or nobody can say."""
    if wish is not None and not wish.needs_dialogs:
        return None
    found: DialogSource | None = _attempt(
        _dialog_subject(job),
        findings,
        lambda: resolve_dialog(job.inputs.dialog_zip, job.settings, is_on_hosted=is_hosted(job.environ)),
    )
    for value in found.masks() if found else ():
        job.mask(value)
    return found


def _dialog_subject(job: Job) -> str:
    return SECRET if job.inputs.dialog_zip is None and job.settings.dialog_url is not None else "dialog_zip"


def _link(job: Job, dialog: DialogSource | None) -> Iterator[Finding]:
    """Yield whether the link to the dialogs opens, from here."""
    if dialog is None or dialog.url is None:
        return
    subject = _dialog_subject(job)
    try:
        opened = probe(dialog.url, allowed_hosts(job.settings.fetch_allow, dialog))
    except ProjectError as error:
        yield wrong(subject, error)
        return
    size = "–" if opened.size is None else f"{number(round(opened.size / 2**20, 1))} MiB"
    is_ending = subject == SECRET and opened.left_s is not None and opened.left_s < SOON_S
    tell = note if is_ending else ok
    yield tell(subject, "doctor.link", source=dialog.shown, size=size, left=duration(opened.left_s))


def _storage_keys(settings: Settings, dialog: DialogSource | None) -> Iterator[Finding]:
    """Yield pairs of which one half is missing, and whole pairs that no address puts to the test."""
    aws = (settings.aws_access_key_id, settings.aws_secret_access_key)
    pairs = (
        ("COS", "ZY_COS_SECRET_ID", settings.cos_secret_id, "ZY_COS_SECRET_KEY", settings.cos_secret_key),
        ("S3", "AWS_ACCESS_KEY_ID", aws[0], "AWS_SECRET_ACCESS_KEY", aws[1]),
    )
    for shown, id_name, key_id, key_name, key in pairs:
        if (key_id is None) != (key is None):
            missing = id_name if key_id is None else key_name
            yield wrong(missing, ProjectError("setting_missing", name=missing))
        elif key is not None and (dialog is None or dialog.shown != shown):
            yield note(f"{id_name}, {key_name}", "doctor.keys_untried", scheme=f"{shown.lower()}://")


def _addresses(job: Job) -> Iterator[Finding]:
    """Yield the addresses that are set and have the form of one; those that have not are faults already."""
    for name in ADDRESSES:
        if job.environ.get(name, "").strip() and name not in job.setting_faults:
            yield ok(name, "doctor.address")


def _unset(job: Job) -> tuple[str, ...]:
    """Return the names of optional settings that are not set."""
    return tuple(row.name for row in SETTINGS if not job.environ.get(row.name, "").strip() and row.name not in NEEDED)


def _box(
    open_box: Callable[[], Box], job: Job, wish: Configuration | None, dialog: DialogSource | None
) -> Iterator[Finding]:
    """Yield how the login went, and what the box says of itself."""
    model_dir, dialog_path = wish.recipe.base_model_dir if wish else None, dialog.path if dialog else None
    request = {**job.places, "base_model_dir": model_dir, "digest": None, "dialog_path": dialog_path}
    try:
        with closing(open_box()) as box:
            before = job.utc_now()
            name, facts = box.name, box.ask("facts", request, timeout_s=FACTS_TIMEOUT_S)
            offset_s = clock_offset_s(facts, before, job.utc_now())
    except ProjectError as error:
        yield wrong("machine" if error.code in ANSWERED else "login", error)
        return
    yield ok("login", "doctor.login", name=name)
    yield ok("python", "doctor.version", version=facts["python"])
    yield ok("tmux", "doctor.version", version=facts["tmux"]) if facts["tmux"] else note("tmux", "doctor.no_tmux")
    for path, disk in facts["disks"].items():
        yield ok("disk", "doctor.disk", path=path, free=f"{disk['free_gib']:.1f}", total=f"{disk['total_gib']:.1f}")
    yield _gpus(facts["gpus"], wish)
    for notice in find_notices(facts, ranks=wish.recipe.ranks if wish else 1, clock_offset_s=offset_s):
        yield note("machine", f"machine.{notice.key}", **notice.values)
    if wish is not None and facts["base_model"] is not None:
        yield _checked("base_model", str(model_dir), lambda: check_base_model(facts["base_model"], str(model_dir)))
    if facts["dialog"] is not None:
        yield _checked("dialog_zip", str(dialog_path), lambda: _check_dialog(facts["dialog"], str(dialog_path)))


def _checked(subject: str, path: str, check: Callable[[], None]) -> Finding:
    try:
        check()
    except ProjectError as error:
        return wrong(subject, error)
    return ok(subject, "doctor.there", path=path)


def _check_dialog(found: dict[str, Any], path: str) -> None:
    if not found["exists"]:
        raise ProjectError("dialog_zip_missing", path=path)


def _gpus(rows: Sequence[dict[str, Any]] | None, wish: Configuration | None) -> Finding:
    """Return the GPUs that the box sees; too few for the recipe is wrong, unless it trains on the processor."""
    wanted = wish.recipe.ranks if wish and wish.recipe.device != "cpu" else 0
    if len(rows or ()) < wanted:
        return wrong("gpu", ProjectError("gpus_missing", wanted=wanted, found=len(rows or ())))
    if not rows:
        return note("gpu", "summary.no_gpu")
    models = ", ".join(dict.fromkeys(f"{row['name']} ({number(row.get('memory_mib'))} MiB)" for row in rows))
    return ok("gpu", "doctor.gpus", count=len(rows), models=models)
