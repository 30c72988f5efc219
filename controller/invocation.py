"""One action from the command line to its exit code: inputs, settings, box, page, summary, annotation.

The only place that knows both GitHub and the pages. Side effects: opens the box; writes to `out`, `err` and the
runner's command files.
"""

from __future__ import annotations

import getpass
import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from controller.dial import Dialed
from controller.github import Runner, defuse
from controller.inputs import carries_a_key, check_inputs
from controller.job import SEES, Job
from controller.reports import Report, report_to_json
from controller.settings import Settings, Ssh
from controller.summary import as_markdown, error_as_markdown
from corpus_builder.errors import EXIT_DEADLINE, EXIT_DONE, ProjectError
from corpus_builder.say import LANGUAGES, SEE_PUBLIC, error_lines, format_error

if TYPE_CHECKING:
    from controller.box import Box


DOCTOR = "doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line gave. `given` holds texts by the names of the workflow's inputs."""

    given: Mapping[str, str]
    sets: tuple[str, ...] = ()
    repo_root: str | None = None
    box_kind: str = "ssh"
    is_dry_run: bool = False
    is_json: bool = False
    lang: str | None = None
    grace_minutes: float = 10.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a call happens: the environment, and where to write."""

    environ: Mapping[str, str]
    out: TextIO
    err: TextIO

    @property
    def runner(self) -> Runner:
        """The runner's conventions, writing commands to `out`."""
        return Runner(self.environ, self.out)


def perform(
    action: str,
    options: Options,
    around: Surroundings,
    *,
    open_box: Callable[[str, Settings], Box] | None = None,
    dialed: Dialed | None = None,
) -> int:
    """Run one action and return its exit code; everything a reader needs has been written by then.

    A connection that was `dialed` is the way to the box, if the settings lead there too.
    """
    lang = choose_lang(options.lang, around.environ)
    runner = around.runner
    see = SEES[runner.sees()]
    open_box = open_box or partial(open_real_box, environ=around.environ, dialed=dialed)
    try:
        report = _run_page(action, options, around, lang, open_box)
    except ProjectError as error:
        return fail(action, error, around, lang)
    markdown = as_markdown(report, lang=lang, see=see)
    runner.write_summary(markdown)
    _write_outputs(runner, report)
    if options.is_json:
        around.out.write(json.dumps(report_to_json(report, see), ensure_ascii=False, indent=1) + "\n")
    else:
        around.out.write("".join(f"{defuse(line)}\n" for line in markdown.splitlines()))
    around.out.flush()
    return EXIT_DONE if report.error is None else tell_error(report.error, around, lang)


def fail(title: str, error: ProjectError, around: Surroundings, lang: str) -> int:
    """Say the error of an action that never began, in the summary too; return the exit code."""
    runner = around.runner
    runner.write_summary(error_as_markdown(title, error, lang=lang, see=SEES[runner.sees()]))
    return tell_error(error, around, lang)


def tell_error(error: ProjectError, around: Surroundings, lang: str) -> int:
    """Say an error to people (stderr) and on the run's page (public words only); return the exit code.

    Under our composite action a passed deadline is a warning, and the step stays green: the work goes on.
    """
    runner = around.runner
    said = format_error(error, lang, see=SEES[runner.sees()])
    around.err.write("".join(f"{defuse(line)}\n" for line in said.splitlines()))
    around.err.flush()
    is_warning = error.exit_code == EXIT_DEADLINE
    message = "\n".join(error_lines(error, lang, see=SEE_PUBLIC))
    runner.annotate("warning" if is_warning else "error", error.code, message)
    return EXIT_DONE if is_warning and runner.is_composite else error.exit_code


def choose_lang(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the language to speak: the option, else `ZY_LANG`, else Chinese."""
    wanted = given or environ.get("ZY_LANG", "")
    return wanted if wanted in LANGUAGES else LANGUAGES[0]


def open_real_box(kind: str, settings: Settings, *, environ: Mapping[str, str], dialed: Dialed | None = None) -> Box:
    """Return the box: over SSH, or this machine."""
    if kind == "local":
        from controller.local_box import LocalBox

        return LocalBox()
    ssh = way_to_box(settings, environ)
    _, host, port = ssh.route()[0]
    if dialed is None or dialed.address != (host, port):
        dialed = Dialed(host, port, ssh.known_hosts)
    try:
        from controller.box import SshBox  # a tenth of a second, in which the network answers

        return SshBox(ssh, dialed=dialed)
    except BaseException:
        dialed.close()
        raise


def way_to_box(settings: Settings, environ: Mapping[str, str]) -> Ssh:
    """Return how to reach the box: by the settings; on a laptop that sets no key, as the person's own ssh would."""
    if settings.gpu_key is None and settings.gpu_password is None:
        from controller.ssh_config import is_laptop, laptop_ssh

        if is_laptop(settings, environ):
            return laptop_ssh(settings, environ)
    return settings.ssh()


def _run_page(
    action: str, options: Options, around: Surroundings, lang: str, open_box: Callable[[str, Settings], Box]
) -> Report:
    runner = around.runner
    given = {**runner.read_inputs(), "action": action, **options.given}
    if carries_a_key(given.get("dialog_zip", "")):
        runner.mask(given["dialog_zip"])  # typed into the form, so nobody has masked it
    inputs = check_inputs(given, sets=options.sets, repo_root=_repo_root(options, around.environ))
    is_doctor = action == DOCTOR  # it works with what there is, and says what is wrong with the rest
    settings, faults = Settings.read(around.environ) if is_doctor else (Settings.from_environment(around.environ), {})
    for secret in settings.masks():
        runner.mask(secret)
    lines_to = around.err if options.is_json else around.out
    page = importlib.import_module(f"controller.actions.{action.replace('-', '_')}")
    job = Job(
        settings=settings,
        inputs=inputs,
        environ=around.environ,
        owner=around.environ.get("GITHUB_ACTOR") or getpass.getuser(),
        commit=runner.commit,
        run_url=runner.run_url,
        lang=lang,
        sees=runner.sees(),
        is_dry_run=options.is_dry_run,
        is_local=options.box_kind == "local",
        setting_faults=faults,
        grace_s=round(60 * options.grace_minutes),
        echo=lambda line: _echo(line, lines_to),
        mask=runner.mask,
    )
    if is_doctor:
        examined: Report = page.run(partial(open_box, options.box_kind, settings), job)
        return examined
    with closing(open_box(options.box_kind, settings)) as box:
        report: Report = page.run(box, job)
    return report


def _echo(line: str, out: TextIO) -> None:
    out.write(defuse(line) + "\n")
    out.flush()


def _repo_root(options: Options, environ: Mapping[str, str]) -> Path:
    return Path(options.repo_root or environ.get("GITHUB_WORKSPACE") or ".")


def _write_outputs(runner: Runner, report: Report) -> None:
    """Set the step's outputs: ids and states only."""
    values: dict[str, Any] = {"state": getattr(report, "state", None), "run_id": getattr(report, "run_id", None)}
    for name, value in values.items():
        if value is not None:
            runner.write_output(name, str(value))
