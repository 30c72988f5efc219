"""Children in process groups of their own: started, found again, ended and verified gone. Side effects: processes.

Runs on the box too: standard library and Python 3.8 only. Every child starts a session, and carries the mark of
the work it belongs to in its environment, so that a grandchild that left the session is found as well. Names of
programs are never searched for.

    {"pid": 4243, "start_ticks": 992, "boot_id": "0b6e…", "pgid": 4243, "mark": "/data/zy/runs/20260503-101500-3fa1"}
"""

import os
import selectors
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from trainer.locks import Process, boot_id, identify, start_ticks

MARK = "ZY_SUPERVISED"
#: Between TERM and KILL when a group must end at once. DeepSpeed's launcher passes TERM on within this time.
TERM_PATIENCE_S = 2.0
KILL_PATIENCE_S = 10.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
#: A line longer than this is taken as it is, so that memory does not depend on the child.
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Child:
    """The head of a process group; `process` is None when it had ended before it could be identified.

    Then its group's number proves nothing, and only the mark finds what it left behind.
    """

    process: Optional[Process]
    pgid: int
    mark: str

    def to_json(self) -> Dict[str, Any]:
        """Return the values for `supervisor.json`."""
        packed = asdict(self.process) if self.process else {"pid": self.pgid, "start_ticks": None, "boot_id": boot_id()}
        return dict(packed, pgid=self.pgid, mark=self.mark)


def child_from_json(packed: Mapping[str, Any]) -> Child:
    """Return the child that `to_json` packed."""
    ticks = packed["start_ticks"]
    process = None if ticks is None else Process(packed["pid"], ticks, packed["boot_id"])
    return Child(process, packed["pgid"], packed["mark"])


def inherited_environment() -> Dict[str, str]:
    """Return our environment without settings: a run is told by its files alone, and counts all GPUs."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ZY_") and name != "CUDA_VISIBLE_DEVICES"
    }


def start_child(
    argv: Sequence[str], *, cwd: str, environment: Mapping[str, str], mark: str
) -> "subprocess.Popen[bytes]":
    """Start `argv` as the head of a new session, output on one pipe, ended with us should we die."""
    return subprocess.Popen(
        list(argv),
        cwd=cwd,
        env=dict(environment, **{MARK: mark}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the supervisor dies: a training without its supervisor holds GPUs for nobody."""
    try:
        import ctypes  # some builds of Python lack it; `find_members` still finds what stays behind

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    except (ImportError, OSError, AttributeError):
        pass


def describe_child(popen: "subprocess.Popen[bytes]", mark: str) -> Child:
    """Return what `supervisor.json` keeps of a child that `start_child` started."""
    try:
        process: Optional[Process] = identify(popen.pid)
    except ProcessLookupError:
        process = None
    return Child(process, popen.pid, mark)


def find_members(child: Child, proc: str = "/proc") -> List[int]:
    """Return the pids that still live of a child's group, session, and of whoever carries its mark.

    A pid is not given away while its group lives; so members count unless the head is a younger process.
    """
    process = child.process
    is_ours = (
        process is not None
        and process.boot_id == boot_id(proc)
        and start_ticks(child.pgid, proc) in (None, process.start_ticks)
    )
    found = []
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        in_group = is_ours and child.pgid in _group_and_session(int(name), proc)
        if in_group or _has_mark(int(name), child.mark, proc):
            found.append(int(name))
    return found


def _group_and_session(pid: int, proc: str) -> Sequence[int]:
    """Return process group and session of a live process, nothing of a zombie or a gone one (proc(5), stat)."""
    try:
        with open(os.path.join(proc, str(pid), "stat"), encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ()
    return () if fields[0] in "ZX" else (int(fields[2]), int(fields[3]))


def _has_mark(pid: int, mark: str, proc: str) -> bool:
    try:
        with open(os.path.join(proc, str(pid), "environ"), "rb") as file:
            return ("%s=%s" % (MARK, mark)).encode() in file.read().split(b"\0")
    except OSError:  # another user's, or gone
        return False


def end_group(
    child: Child,
    *,
    term_patience_s: float = TERM_PATIENCE_S,
    reap: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> List[int]:
    """End every member, TERM first, KILL after `term_patience_s`; return the pids that are still alive.

    `reap` is called between looks: the parent collects its dead child there.
    """
    for number, patience_s in ((signal.SIGTERM, term_patience_s), (signal.SIGKILL, KILL_PATIENCE_S)):
        give_up = clock() + patience_s
        _send(find_members(child), number)
        while find_members(child):
            if clock() >= give_up:
                break
            if number == signal.SIGKILL:
                _send(find_members(child), number)  # a fork may have slipped through
            sleep(0.05)
            reap()
        else:
            return []
    return find_members(child)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


class Lines:
    """The lines of a pipe, as they come; what has no end yet is passed on after two seconds."""

    FLUSH_AFTER_S = 2.0

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._selector = selectors.DefaultSelector()
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._pending = b""
        self._shown = 0  # bytes of `_pending` that were passed on already
        self._since = time.monotonic()
        self.is_closed = False

    def read(self, timeout_s: float) -> Iterator[Tuple[bytes, Optional[bytes]]]:
        """Yield `(bytes to copy, whole line or None)` for what arrives within `timeout_s`."""
        if not self.is_closed and self._selector.select(timeout_s):
            data = os.read(self._descriptor, 1 << 16)
            self.is_closed = not data
            self._pending += data
        elif self.is_closed:
            time.sleep(timeout_s)
        while b"\n" in self._pending or len(self._pending) > MAX_LINE_BYTES or (self.is_closed and self._pending):
            line, _, self._pending = self._pending.partition(b"\n")
            rest, self._shown, self._since = line[self._shown :], 0, time.monotonic()
            yield rest + b"\n", line
        if len(self._pending) > self._shown and time.monotonic() - self._since > self.FLUSH_AFTER_S:
            rest, self._shown, self._since = self._pending[self._shown :], len(self._pending), time.monotonic()
            yield rest, None
