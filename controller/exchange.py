"""One request to the box and its answer: the loader, the framing of stdin, the markers on stdout (design 4.5).

stdin:  8-byte length, agent bundle, 8-byte length, request JSON, then whatever the operation streams.
stdout: noise, `ZY_ANSWER_BEGIN <nonce>`, one line of JSON, `ZY_ANSWER_END <nonce>`. The nonce is new for every
request, so neither a banner nor the content of a log can pass for an answer.

Side effects: `converse` reads and writes a `Wire`, with two threads, so that no full pipe can stop another.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from corpus_builder.errors import Named, ProjectError

#: The whole program that stands in a command line. No quote, no newline, no backslash, no exclamation mark: every
#: login shell passes it on unchanged between single quotes. `-IS`: no folder of the box can shadow a module of ours.
LOADER = (
    "import json,sys,zlib;"
    'sys.version_info<(3,8)and sys.exit("ZY_OLD_PYTHON "+sys.version.split()[0]);'
    "f=sys.stdin.buffer;"
    'part=lambda:f.read(int.from_bytes(f.read(8),"big"));'
    "bundle=json.loads(zlib.decompress(part()));"
    'exec(bundle["controller.boxside.importer"]);'
    "install(bundle);"
    "from controller.boxside.__main__ import serve;"
    "serve(json.loads(part()),f,sys.stdout.buffer)"
)
PYTHON_OPTIONS = ("-I", "-S", "-c")
MAX_ANSWER_BYTES = 64 * 2**20
_KEPT_ERROR_BYTES = 64 * 2**10
_EXIT_NOT_FOUND = (126, 127)
_CHUNK = 2**16
_LAST_WAIT_S = 5  # for threads whose wire is already closed


class Wire(Protocol):
    """A running loader: its stdin, stdout and stderr. Reads return b"" at the end; `close` wakes every reader."""

    def write(self, data: bytes) -> None: ...
    def end_write(self) -> None: ...
    def read(self, size: int) -> bytes: ...
    def read_error(self, size: int) -> bytes: ...
    def exit_code(self) -> int | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready to be sent."""

    nonce: str
    payload: bytes = field(repr=False)


def make_request(op: str, args: Mapping[str, Any], bundle: bytes) -> Request:
    """Return the request for operation `op` with a fresh nonce."""
    nonce = secrets.token_hex(16)
    text = json.dumps({"nonce": nonce, "op": op, "args": args}).encode()
    return Request(nonce, b"".join(len(part).to_bytes(8, "big") + part for part in (bundle, text)))


@dataclass(slots=True)
class Talk:
    """What a wire said until the answer was complete, it ended (`exit_code`), or the time was up."""

    out: bytearray = field(default_factory=bytearray)
    error_tail: bytearray = field(default_factory=bytearray)
    exit_code: int | None = None
    is_timed_out: bool = False
    stream_failure: BaseException | None = None

    def expire(self, wire: Wire) -> None:
        """End the talk: the time is up."""
        self.is_timed_out = True
        wire.close()

    def write(self, wire: Wire, parts: Iterable[bytes]) -> None:
        """Write everything; keep what the parts themselves raise (a source file vanished)."""
        source = iter(parts)
        while True:
            try:
                data = next(source, None)
            except BaseException as error:
                self.stream_failure = error
                wire.close()
                return
            try:
                if data is None:
                    wire.end_write()
                    return
                wire.write(data)
            except OSError:
                return  # the other side no longer reads; what it said decides

    def read_errors(self, wire: Wire) -> None:
        """Drain stderr to its end, keeping the last part."""
        while data := wire.read_error(_CHUNK):
            self.error_tail += data
            del self.error_tail[:-_KEPT_ERROR_BYTES]

    def read_until(self, wire: Wire, end: bytes) -> bool:
        """Read stdout up to `end`; return False when it ended before."""
        while data := wire.read(_CHUNK):
            self.out += data
            if self.out.find(end, max(0, len(self.out) - len(data) - len(end))) >= 0:
                return True
            if len(self.out) > MAX_ANSWER_BYTES:
                return True
        return False


def converse(wire: Wire, request: Request, stream: Iterable[bytes] | None, *, timeout_s: float) -> Talk:
    """Send the request and its stream while reading what comes back; the wire is closed afterwards.

    Raises:
        Exception: whatever `stream` itself raised.
    """
    talk = Talk()
    timer = threading.Timer(timeout_s, talk.expire, (wire,))
    timer.daemon = True
    writer = threading.Thread(target=talk.write, args=(wire, chain([request.payload], stream or ())), daemon=True)
    drain = threading.Thread(target=talk.read_errors, args=(wire,), daemon=True)
    for thread in (timer, writer, drain):
        thread.start()
    try:
        if not talk.read_until(wire, f"ZY_ANSWER_END {request.nonce}".encode()):
            drain.join()
            talk.exit_code = wire.exit_code()
    finally:
        timer.cancel()
        wire.close()
        writer.join(timeout=_LAST_WAIT_S)
        drain.join(timeout=_LAST_WAIT_S)
    if talk.stream_failure is not None:
        raise talk.stream_failure
    return talk


def read_answer(talk: Talk, request: Request, *, host: str) -> dict[str, Any]:
    """Return the answer in what the wire said.

    Raises:
        ProjectError: the box's own error; or `connection_lost`, `box_no_python`, `answer_unreadable`.
    """
    pattern = rb"ZY_ANSWER_BEGIN %b\r?\n(.*?)\r?\n?ZY_ANSWER_END %b" % ((request.nonce.encode(),) * 2)
    match = re.search(pattern, bytes(talk.out), re.DOTALL)
    if match is None:
        raise _no_answer(talk, host)
    try:
        answer = json.loads(match[1])
        if "error" in answer:
            error = ProjectError.from_json(answer["error"])
        else:
            return dict(answer["ok"])
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ProjectError("answer_unreadable", host=host, exit_code=0, reason=type(problem).__name__) from problem
    raise error


def _no_answer(talk: Talk, host: str) -> ProjectError:
    if talk.is_timed_out:
        return ProjectError("connection_lost", host=host, reason="reason.no_answer_in_time")
    if talk.exit_code is None:
        if len(talk.out) > MAX_ANSWER_BYTES:
            return ProjectError("answer_unreadable", host=host, exit_code=-1, reason="reason.answer_too_long")
        return ProjectError("connection_lost", host=host, reason="reason.link_cut")
    said = bytes(talk.error_tail).decode("utf-8", "replace")
    if old := re.search(r"^ZY_OLD_PYTHON ([\w.+-]+)", said, re.MULTILINE):
        return ProjectError("box_no_python", host=host, reason=f"reason.old_python {old[1]}")
    if talk.exit_code in _EXIT_NOT_FOUND or re.search(r"python3: command not found", said, re.IGNORECASE):
        return ProjectError("box_no_python", host=host, reason="reason.no_python")
    lines = [line for line in said.splitlines() if line.strip()]
    reason = Named(lines[-1].strip()[:200]) if lines else "reason.said_nothing"
    return ProjectError("answer_unreadable", host=host, exit_code=talk.exit_code, reason=reason)
