"""What tmux runs: `python3 -m trainer.supervise SPEC.json`. Takes the lock, runs the steps, writes the outcome last.

Runs on the box too, and with a broken environment: standard library and Python 3.8 only. Side effects: files of
the run, the lock, child processes. State never depends on tmux: SIGHUP is ignored, SIGTERM asks for a checkpoint.

    {"kind": "setup", "folder": "/data/zy/setups/s1", "data": "/data/zy", "log": "/data/zy/logs/setup.log",
     "lock": "/opt/zy/locks/setup.json", "owner": "alice", "action": "setup-only", "name": "s1", "final": null,
     "steps": [{"name": "fetch", "argv": ["python3", "-m", "…"], "cwd": "/opt/…/code", "env": {}, "log": null,
                "secrets": ["ZY_DIALOG_URL"]}],
     "grace_s": 120}
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from corpus_builder.errors import EXIT_REFUSED, EXIT_RUN_FAILED, EXIT_UNFIT, ProjectError
from corpus_builder.log_lines import log_line
from trainer.children import Child, Lines, describe_child, end_group, inherited_environment, start_child
from trainer.journal import (
    BLOCK_BYTES,
    CHECKPOINT,
    NOW,
    Journal,
    give_back,
    now_utc,
    reserve,
    save_json,
    save_outcome,
    save_text,
    seconds_since_boot,
)
from trainer.locks import Lock, Process, identify, release_lock, take_lock
from trainer.on_end import AFTER_S, ON_END, OnEnd, leave_behind
from trainer.remedies import find_remedy
from trainer.run_paths import RunPaths
from trainer.run_state import FAILED, INTERRUPTED, KILLED, RUNNING, STARTING, SUCCEEDED, Outcome
from trainer.stopping import NOW_SIGNAL, StopRequest

POLL_S = 0.2
#: After the child's end: how long its pipe may still hold lines of a grandchild.
DRAIN_S = 1.0
TRAIN = "train"
Made = TypeVar("Made")
ENDED_AT_ONCE = "ended at once on request"


@dataclass(frozen=True)
class Step:
    """One child: `env` holds no secrets, `log` is a second log, `secrets` names the ones that it needs."""

    name: str
    argv: List[str]
    cwd: str
    env: Dict[str, str] = field(default_factory=dict)
    log: Optional[str] = None
    secrets: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class Spec:
    """What to supervise. `final`: the folder whose existence makes a training succeed.

    `on_end_locks`: where others who work on this machine hold theirs; while one does, `ZY_ON_END` is left undone.
    `text`: the file that it was read from.
    """

    kind: str
    folder: str
    data: str
    log: str
    lock: str
    owner: str
    action: str
    name: str
    steps: List[Step]
    grace_s: float = 120.0
    final: Optional[str] = None
    on_end_after_s: float = AFTER_S
    on_end_locks: List[str] = field(default_factory=list)
    text: str = field(default="", repr=False)

    @property
    def paths(self) -> RunPaths:
        """The files of this run or setup."""
        return RunPaths(self.folder, self.log, os.path.dirname(self.final or ""))


@dataclass(frozen=True)
class End:
    """How the steps ended."""

    state: str
    reason: str
    exit_code: Optional[int] = None
    signal: Optional[int] = None


def load_spec(path: str) -> Spec:
    """Return the specification in `path`; unknown keys of a newer writer are ignored."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    packed = json.loads(text)
    steps = [Step(**{key: row[key] for key in Step.__dataclass_fields__ if key in row}) for row in packed["steps"]]
    known = {key: packed[key] for key in Spec.__dataclass_fields__ if key in packed}
    return Spec(**dict(known, steps=steps, text=text))


class Supervisor:
    """One attempt: its journal, its secrets, and the request to stop."""

    def __init__(self, spec: Spec, me: Process, secrets: Dict[str, str], stop: StopRequest) -> None:
        self.spec = spec
        self.attempts = _earlier_attempts(spec.paths.supervisor)
        self.journal = Journal(spec.paths, attempt=len(self.attempts) + 1, secrets=list(secrets.values()))
        self.mark = spec.folder
        self.tag = "train" if spec.kind == TRAIN else "setup"
        self._secrets = secrets
        self._stop = stop
        self._stop_seen_at: Optional[float] = None
        self.attempts.append(
            {
                "attempt": self.journal.attempt,
                "process": asdict(me),
                "child": None,
                "started_at": now_utc(),
                "started_t": round(seconds_since_boot(), 3),
                "log_start": self.journal.log_start,
                "now_signal": int(NOW_SIGNAL),
            }
        )
        # before anything runs, a disk that takes nothing is a failure; one that fills up later hides no end
        reserve(spec.paths.outcome)
        reserve(spec.paths.stop, BLOCK_BYTES)
        self._save_attempts()

    def _save_attempts(self) -> None:
        save_json(self.spec.paths.supervisor, {"attempts": self.attempts})

    def _try_to_save_attempts(self) -> None:
        try:
            self._save_attempts()
        except OSError:
            self.journal.unwritten_lines += 1

    def run(self) -> End:
        """Run the steps in order until one fails or a stop ends them."""
        for name in sorted(self._secrets):
            self.journal.say(log_line(self.tag, "environment {name}=<redacted>", name=name))
        self.journal.save_state(STARTING, self.spec.steps[0].name, is_urgent=True)
        for step in self.spec.steps:
            if self._stop.mode() is not None:
                return End(KILLED, "ended on request before step %s" % step.name)
            self.journal.event("step_started", step=step.name)
            end = self._run_step(step)
            self.journal.event("step_finished", step=step.name, result=end.state)
            if end.state != SUCCEEDED:
                return end
        if self.spec.kind != TRAIN or (self.spec.final is not None and os.path.isdir(self.spec.final)):
            return End(SUCCEEDED, "done", 0)
        if self._stop.mode() == NOW:
            return End(KILLED, ENDED_AT_ONCE, 0)
        if self.journal.stop_was_seen or self._stop.mode() is not None:
            return End(INTERRUPTED, "stopped on request with a checkpoint", 0)
        return End(FAILED, "the training ended without a final model", 0)

    def _run_step(self, step: Step) -> End:
        """Run one child to its end, or end it when a stop asks for that."""
        environment = dict(inherited_environment(), **step.env)
        environment.update((name, self._secrets[name]) for name in step.secrets if name in self._secrets)
        try:
            popen = start_child(step.argv, cwd=step.cwd, environment=environment, mark=self.mark)
        except OSError as error:
            return End(FAILED, "step %s could not start: %s" % (step.name, type(error).__name__))
        child = Child(None, popen.pid, self.mark)  # until it is identified, its mark finds it
        try:
            child = describe_child(popen, self.mark)
            self.attempts[-1]["child"] = child.to_json()
            self._try_to_save_attempts()
            killed_because = self._follow(popen, child, step)
        finally:
            left = end_group(child, reap=popen.poll)
            if left:
                self.journal.say(log_line(self.tag, "{count} process(es) could not be ended", count=len(left)))
        code = popen.wait()
        if killed_because is None and code != 0 and self._stop.mode() == NOW:
            killed_because = ENDED_AT_ONCE  # it went by itself, a moment before we ended it
        if killed_because is not None:
            return End(KILLED, killed_because, *_code_and_signal(code))
        if code == 0:
            return End(SUCCEEDED, "done", 0)
        how = "exit code %d" % code if code > 0 else "signal %d" % -code
        return End(FAILED, "step %s ended with %s" % (step.name, how), *_code_and_signal(code))

    def _follow(self, popen: "subprocess.Popen[bytes]", child: Child, step: Step) -> Optional[str]:
        """Copy the child's lines until it ends; return why it had to be killed, or None."""
        assert popen.stdout is not None
        killed_because: Optional[str] = None
        ended_at: Optional[float] = None
        with popen.stdout as pipe:
            lines = Lines(pipe.fileno())
            while True:
                for shown, line in lines.read(POLL_S):
                    self.journal.write(shown, step.log)
                    if line is not None:
                        self.journal.read(line)
                state = STARTING if self.spec.kind == TRAIN and self.journal.last is None else RUNNING
                self.journal.save_state(state, step.name)
                if popen.poll() is not None:
                    ended_at = ended_at or time.monotonic()
                    if lines.is_closed or time.monotonic() - ended_at > DRAIN_S:
                        return killed_because
                elif killed_because is None:
                    killed_because = self._why_kill()
                    if killed_because is not None:
                        end_group(child, reap=popen.poll)

    def _why_kill(self) -> Optional[str]:
        """Return why the child must end now: `now`, or a checkpoint that took longer than the grace."""
        mode = self._stop.mode()
        if mode is None:
            return None
        if mode == NOW or self.spec.kind != TRAIN:
            return ENDED_AT_ONCE
        self._stop_seen_at = self._stop_seen_at or seconds_since_boot()
        if seconds_since_boot() - self._stop_seen_at > self.spec.grace_s:
            return "no checkpoint within %g s of the request to stop" % self.spec.grace_s
        return None

    def finish(self, end: End) -> Outcome:
        """Write what can be written, and `outcome.json` last; raise OSError when that one cannot be."""
        # the reason too: a child that was killed says nothing itself
        remedy = find_remedy("%s\n%s" % (self.journal.tail(), end.reason)) if end.state == FAILED else None
        outcome = Outcome(
            state=end.state,
            exit_code=end.exit_code,
            signal=end.signal,
            reason=end.reason,
            last_step=self.journal.last_step,
            ended_at=now_utc(),
            remedy=remedy.code if remedy else None,
            error=self.journal.error.to_json() if self.journal.error and end.state == FAILED else None,
        )
        self._restore_folder()
        self.journal.save_state(end.state, "", is_urgent=True)
        count = self.journal.unwritten_lines + self._stop.unwritten
        if count:
            self.journal.say(log_line(self.tag, "{count} line(s) or file(s) could not be written", count=count))
        self.attempts[-1].update(log_start=self.journal.log_start, log_end=self.journal.log_size)  # a log begun anew
        self._try_to_save_attempts()
        give_back(self.spec.paths.stop)
        save_outcome(self.spec.paths.outcome, outcome)
        return outcome

    def _restore_folder(self) -> None:
        """Make a folder that was deleted underneath again, so that how the work ended has a place where it is found."""
        try:
            os.makedirs(self.spec.folder, mode=0o700, exist_ok=True)
            if not os.path.exists(self.spec.paths.supervisor_spec):
                save_text(self.spec.paths.supervisor_spec, self.spec.text)
        except OSError:
            self.journal.unwritten_lines += 1


def _code_and_signal(code: int) -> Tuple[Optional[int], Optional[int]]:
    return (code, None) if code >= 0 else (None, -code)


def _earlier_attempts(path: str) -> List[Dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            return list(json.load(file)["attempts"])
    except (OSError, ValueError, KeyError):
        return []


def load_secrets(path: str) -> Dict[str, str]:
    """Return the environment of the children that no command line and no log may hold."""
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return {}


def supervise(spec: Spec) -> int:
    """Hold the lock, run the steps, write the outcome, let the lock go; then what the person wants done at the end."""
    me = identify(os.getpid())
    stop = StopRequest(spec.paths, CHECKPOINT if spec.kind == TRAIN else NOW)
    stop.listen()
    try:
        _holding_disk(spec, lambda: take_lock(spec.lock, Lock(spec.owner, spec.action, spec.name, me)))
    except ProjectError as error:
        _forget(spec.paths.secrets)
        save_json(spec.paths.error, error.to_json())
        return EXIT_REFUSED if error.code == "lock_held" else EXIT_UNFIT
    on_end: Optional[OnEnd] = None
    try:
        secrets = load_secrets(spec.paths.secrets)
        wish = secrets.pop(ON_END, None)
        try:
            supervisor = _holding_disk(spec, lambda: Supervisor(spec, me, secrets, stop))
        except ProjectError as error:
            save_json(spec.paths.error, error.to_json())
            return EXIT_UNFIT
        if wish is not None and spec.kind == TRAIN:
            on_end = OnEnd(wish, spec.on_end_after_s, spec.on_end_locks, supervisor.journal.attempt)
            supervisor.journal.event("on_end", what=on_end.what, result="after_the_run")
        try:
            end = supervisor.run()
        except BaseException as error:
            supervisor.finish(End(FAILED, "the supervisor failed: %s" % type(error).__name__))
            raise
        state = supervisor.finish(end).state
        return 0 if state in (SUCCEEDED, INTERRUPTED) else EXIT_RUN_FAILED
    finally:
        try:
            _forget(spec.paths.secrets)
        finally:
            release_lock(spec.lock, me)
            if on_end is not None:
                leave_behind(on_end, spec.paths)


def _holding_disk(spec: Spec, begin: Callable[[], Made]) -> Made:
    """Return what `begin` makes; raise `box_not_writable` where the disk takes nothing."""
    try:
        return begin()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ProjectError("box_not_writable", path=spec.data, reason=reason) from error


def _forget(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


if __name__ == "__main__":
    os.umask(0o077)
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # a handler, not SIG_IGN: children start undisturbed
    sys.exit(supervise(load_spec(sys.argv[1])))
