"""The way to the box, looked at piece by piece for the doctor: key, passphrase, pins, each hop up to the login.

A host's keys are learnt by a key exchange that ends before any login. A hop is logged in to only when its key is
pinned and only to look at the next one. Side effects: network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import paramiko

from controller.findings import note, ok, untried, wrong
from controller.host_keys import PinnedKeys, fingerprint, parse_pins, pin_line
from controller.job import Job
from controller.link import Hop, Link, Login, Patience, WorthAnotherTry, learn_host_keys, open_link
from controller.private_keys import is_locked, load_private_key
from controller.reports import Finding
from controller.settings import Settings, Ssh
from controller.ssh_config import is_laptop, laptop_ssh
from corpus_builder.errors import ProjectError

KEY, PASSPHRASE, PASSWORD, PINS = "ZY_GPU_KEY", "ZY_GPU_KEY_PASSPHRASE", "ZY_GPU_PASSWORD", "ZY_GPU_KNOWN_HOSTS"


def examine_way(job: Job) -> tuple[list[Finding], list[str], bool]:
    """Return what was found, the known_hosts lines of hosts that are not pinned, and whether a login may be tried."""
    settings = job.settings
    if is_laptop(settings, job.environ):
        return _examine_laptop(job)
    findings = list(_key(settings))
    can_log_in = not any(one.error for one in findings) and KEY not in job.setting_faults
    if settings.gpu_user is None and "ZY_GPU_USER" not in job.setting_faults:
        findings.append(wrong("ZY_GPU_USER", ProjectError("setting_missing", name="ZY_GPU_USER")))
    if settings.gpu_host is None:
        if "ZY_GPU_HOST" not in job.setting_faults:
            findings.append(wrong("ZY_GPU_HOST", ProjectError("setting_missing", name="ZY_GPU_HOST")))
        return [*findings, *_pins_alone(settings.gpu_known_hosts), untried("host")], [], False
    if not can_log_in or settings.gpu_user is None:
        return _examine_hops(_ssh_without_login(settings), findings, can_log_in=False)
    return _examine_hops(settings.ssh(), findings, can_log_in=True)


def _examine_laptop(job: Job) -> tuple[list[Finding], list[str], bool]:
    try:
        ssh = laptop_ssh(job.settings, job.environ)
    except ProjectError as error:
        subject = "ZY_GPU_HOST" if error.code == "setting_missing" else "ssh"
        return [wrong(subject, error), untried("host")], [], False
    files = sum(Path(name).is_file() for name in ssh.key_files)
    findings = [note("ssh", "doctor.own_ssh", name=ssh.name, files=files)]
    if not files and not ssh.uses_agent and ssh.agent_only is None:
        findings = [wrong(KEY, ProjectError("setting_missing", name=KEY))]
    return _examine_hops(ssh, findings, can_log_in=not findings[0].error)


def _ssh_without_login(settings: Settings) -> Ssh:
    """Return the way as far as it is known; nothing of it logs in."""
    return Ssh(
        host=settings.gpu_host or "", port=settings.gpu_port, user=settings.gpu_user or "",
        known_hosts=settings.gpu_known_hosts or "", jump=settings.gpu_jump, key=None, passphrase=None, password=None,
    )  # fmt: skip


def _key(settings: Settings) -> Iterator[Finding]:
    """Yield whether the key is one, and whether the passphrase opens it."""
    if settings.gpu_password is not None:
        yield note(PASSWORD, "doctor.password")
    if settings.gpu_key is None:
        if settings.gpu_password is None:
            yield wrong(KEY, ProjectError("setting_missing", name=KEY))
        return
    text = settings.gpu_key.get_secret_value()
    passphrase = settings.gpu_key_passphrase.get_secret_value() if settings.gpu_key_passphrase else None
    is_known_locked = False
    try:
        is_known_locked = is_locked(text)
        key = load_private_key(text, passphrase)
    except ProjectError as error:
        yield wrong(PASSPHRASE if is_known_locked else KEY, error)
        return
    yield ok(KEY, "doctor.key", kind=key.get_name(), fingerprint=fingerprint(key.asbytes()))
    if passphrase is not None:
        yield ok(PASSPHRASE, "doctor.passphrase") if is_known_locked else note(PASSPHRASE, "doctor.passphrase_idle")


def _pins_alone(text: str | None) -> Iterator[Finding]:
    """Yield whether there are pins, and which lines of them cannot be used; for no host in particular."""
    if not text:
        yield wrong(PINS, ProjectError("setting_missing", name=PINS))
        return
    try:
        yield from _problems(parse_pins(text, host="", port=22))
    except ProjectError as error:
        yield wrong(PINS, error)


def _problems(pinned: PinnedKeys) -> Iterator[Finding]:
    for problem in pinned.problems:
        yield note(PINS, "doctor.pin_problem", problem=problem)


def _examine_hops(ssh: Ssh, findings: list[Finding], *, can_log_in: bool) -> tuple[list[Finding], list[str], bool]:
    """Look at hop after hop; the last one is not logged in to here."""
    pin_lines: list[str] = []
    try:
        hops = [Hop(user, parse_pins(ssh.known_hosts, host=host, port=port)) for user, host, port in ssh.route()]
        findings += _problems(hops[-1].pinned)
    except ProjectError as error:
        findings.append(wrong(PINS, error))
        hops = [Hop(user, parse_pins("", host=host, port=port)) for user, host, port in ssh.route()]
    with ExitStack() as links:
        through: Link | None = None
        for number, hop in enumerate(hops, 1):
            if number > 1:
                if not can_log_in:
                    return [*findings, untried("host")], pin_lines, False
                try:
                    through = links.enter_context(
                        closing(open_link(hops[number - 2], Login.of(ssh), through, Patience()))
                    )
                except (ProjectError, WorthAnotherTry) as error:
                    return [*findings, wrong("login", _final(error)), untried("host")], pin_lines, False
            try:
                keys = learn_host_keys(hop.pinned.host, hop.pinned.port, through)
            except (ProjectError, WorthAnotherTry) as error:
                unpinned = [] if ssh.known_hosts else list(_pins_alone(None))
                return [*findings, wrong("host", _final(error)), *unpinned], pin_lines, False
            findings.append(ok("host", "doctor.answers", name=hop.name, count=len(keys)))
            findings.append(_compare(hop.pinned, keys))
            if findings[-1].error is not None:
                pin_lines += [pin_line(hop.pinned.host, hop.pinned.port, key) for key in keys]
                can_log_in = False
    return findings, pin_lines, can_log_in


def _compare(pinned: PinnedKeys, keys: tuple[paramiko.PKey, ...]) -> Finding:
    """Return whether one of the keys that a host shows is pinned."""
    held = next((key for key in keys if pinned.holds(key)), None)
    if held is not None:
        return ok(PINS, "doctor.pinned", kind=held.get_name(), fingerprint=fingerprint(held.asbytes()))
    try:
        pinned.check(keys[0])
    except ProjectError as error:
        return wrong(PINS, error)
    raise AssertionError("unreachable")


def _final(error: ProjectError | WorthAnotherTry) -> ProjectError:
    """Return the error of an attempt that gets no second one: the doctor answers in seconds."""
    if isinstance(error, ProjectError):
        return error
    return ProjectError("box_unreachable", host=error.host, reason=str(error))
