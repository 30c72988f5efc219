"""After the end of a training: the machine goes off, or a command of the person's runs (`ZY_ON_END`).

Runs on the box too: standard library and Python 3.8 only. Side effects: a process of its own, which outlives whoever
leaves it behind; what the person asked for; an event and lines of the run's log. The wait before it lets whoever
follows the run read its end. It is left undone while somebody works here: a machine never goes off under a new run.

    ZY_EVENT name=on_end what=poweroff by=systemctl result=accepted
    ZY_EVENT name=on_end what=command result=ended code=0
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from trainer.children import Lines, inherited_environment
from trainer.journal import Journal
from trainer.locks import is_alive, read_lock
from trainer.run_paths import RunPaths

ON_END = "ZY_ON_END"
POWEROFF = "poweroff"
AFTER_S = 60.0
COMMAND_TIMEOUT_S = 600.0
POWEROFF_TIMEOUT_S = 30.0
_OFF = (("systemctl", "poweroff"), ("poweroff",), ("shutdown", "-h", "now"))
#: First as we are; then as root where that takes no password.
WAYS_OFF = _OFF + tuple(("sudo", "-n") + words for words in _OFF)
#: What a login without a shell has not in its PATH.
_SYSTEM_PATH = "/usr/sbin:/sbin"
_SHOWN_BYTES = 64 * 1024  # of what a command says
CANNOT_RUN = 126  # as a shell says it
_POLL_S = 0.2
_DRAIN_S = 1.0  # after its end: how long a grandchild may hold the pipe


@dataclass(frozen=True)
class OnEnd:
    """What to do `after_s` seconds after a run's end, unless one of `locks` is held then."""

    wish: str
    after_s: float
    locks: List[str]
    attempt: int

    @property
    def what(self) -> str:
        """`poweroff` or `command`: the command itself is nobody's to read."""
        return POWEROFF if self.wish == POWEROFF else "command"


def split_command(wish: str) -> List[str]:
    """Return the words of a command; raise ValueError where quotes do not match or there are none."""
    words = shlex.split(wish)
    if not words:
        raise ValueError("no words")
    return words


def leave_behind(on_end: OnEnd, paths: RunPaths) -> None:
    """Return at once; a process of its own, in a session of its own, waits and does it."""
    if os.fork() > 0:
        return
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        _let_go_of_files()
        time.sleep(on_end.after_s)
        carry_out(on_end, paths)
    finally:
        os._exit(0)


def _let_go_of_files() -> None:
    """Hold no pipe and no terminal of whoever left us behind: it would wait for us.

    What Python opened is not inheritable and stays: an object closes its number once more when it goes, and that would
    then be a file of somebody else.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]:
        try:
            if os.get_inheritable(descriptor):
                os.close(descriptor)
        except OSError:
            pass  # the list's own


def carry_out(on_end: OnEnd, paths: RunPaths) -> None:
    """Do it now, and say how that went."""
    secrets = [] if on_end.wish == POWEROFF else [on_end.wish]
    try:
        journal: Optional[Journal] = Journal(paths, attempt=on_end.attempt, secrets=secrets)
    except OSError:
        journal = None  # the folder is gone, the wish is not

    def tell(**values: str) -> None:
        if journal is not None:
            journal.event("on_end", what=on_end.what, **values)

    if any(_is_held(path) for path in on_end.locks):
        tell(result="skipped", reason="at_work")
    elif on_end.wish == POWEROFF:
        tell(**_power_off(journal))
    else:
        tell(**_run_command(on_end.wish, journal))
    if journal is not None:
        journal.close()


def _is_held(path: str) -> bool:
    lock = read_lock(path)
    return lock is not None and is_alive(lock.process)


def _power_off(journal: Optional[Journal]) -> Dict[str, str]:
    """Ask every way until one accepts; return what to say of it."""
    for words in WAYS_OFF:
        if _run(words, POWEROFF_TIMEOUT_S, journal) == 0:
            by = "-".join(word for word in words if word not in ("-n", "-h", "now"))
            return {"by": by, "result": "accepted"}
    return {"result": "refused"}


def _run_command(wish: str, journal: Optional[Journal]) -> Dict[str, str]:
    try:
        words = split_command(wish)
    except ValueError:
        return {"result": "unreadable"}
    if _find(words[0]) is None:
        return {"result": "not_found"}
    code = _run(words, COMMAND_TIMEOUT_S, journal)
    return {"result": "timed_out"} if code is None else {"result": "ended", "code": str(code)}


def _environment() -> Dict[str, str]:
    inherited = inherited_environment()
    return dict(inherited, PATH=inherited.get("PATH", os.defpath) + os.pathsep + _SYSTEM_PATH)


def _find(program: str) -> Optional[str]:
    return shutil.which(program, path=_environment()["PATH"])


def _run(words: Sequence[str], timeout_s: float, journal: Optional[Journal]) -> Optional[int]:
    """Run a program without a shell; return its exit code, None when there is none of that name or it had to be ended.

    `CANNOT_RUN`: the system refused to start it.
    """
    program = _find(words[0])
    if program is None:
        return None
    try:
        popen = subprocess.Popen(
            [program, *words[1:]], cwd="/", env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except OSError:
        return CANNOT_RUN
    assert popen.stdout is not None
    give_up, left = time.monotonic() + timeout_s, _SHOWN_BYTES
    with popen.stdout as pipe:
        lines = Lines(pipe.fileno())
        while time.monotonic() < give_up:
            if popen.poll() is not None:
                give_up = min(give_up, time.monotonic() + _DRAIN_S)
            for shown, _ in lines.read(_POLL_S):
                if journal is not None and left > 0:
                    journal.write(shown[:left])
                    left -= len(shown)
            if popen.poll() is not None and lines.is_closed:
                break
    if popen.poll() is not None:
        return popen.returncode
    try:
        os.killpg(popen.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    popen.wait()
    return None
