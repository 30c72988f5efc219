"""The agent's door: one request in, one answer out; and the door of the steps that run on the box.

    serve({"nonce": …, "op": "status", "args": {…}}, stream, out)          called by the loader (design 4.5)
    python3 -m controller.boxside step <name> <request.json>               called by a setup's supervisor

Runs on the box: standard library and Python 3.8 only. The answer is one line of ASCII between two marker lines that
carry the request's nonce: noise and the content of logs cannot pass for it.
"""

import json
import os
import re
import sys
import traceback
from typing import IO, Any, Callable, Dict

from controller.boxside.arguments import Arguments
from controller.boxside.ending import gone, kill
from controller.boxside.facts import facts
from controller.boxside.logs import follow, tail_log
from controller.boxside.operations import start_setup, start_train
from controller.boxside.releases import receive_release
from controller.boxside.status import manifest, status
from controller.boxside.uploads import receive_upload, upload_state
from corpus_builder.errors import EXIT_INPUT, ProjectError

OPS: Dict[str, Callable[[Arguments], Dict[str, Any]]] = {
    "facts": facts,
    "start_setup": start_setup,
    "start_train": start_train,
    "follow": follow,
    "manifest": manifest,
    "status": status,
    "tail_log": tail_log,
    "kill": kill,
    "gone": gone,
    "upload_state": upload_state,
}
#: What reads on where the request ends.
STREAM_OPS: Dict[str, Callable[[Arguments, IO[bytes]], Dict[str, Any]]] = {
    "receive_release": receive_release,
    "receive_upload": receive_upload,
}
_NONCE = re.compile(r"[0-9A-Za-z_-]{1,128}\Z")


def serve(request: Any, stream: IO[bytes], out: IO[bytes]) -> None:
    """Do what the request asks for and write the answer to `out`; `stream` is the rest of stdin."""
    os.umask(0o077)
    nonce = request.get("nonce") if isinstance(request, dict) else None
    nonce = nonce if isinstance(nonce, str) and _NONCE.match(nonce) else ""
    answer = _answer(request, stream)
    line = json.dumps(answer, ensure_ascii=True)
    out.write(("ZY_ANSWER_BEGIN %s\n%s\nZY_ANSWER_END %s\n" % (nonce, line, nonce)).encode("ascii"))
    out.flush()


def _answer(request: Any, stream: IO[bytes]) -> Dict[str, Any]:
    """Return `{"ok": result}` or `{"error": …}`; a bug shows the names of its lines on stderr, none of its values."""
    try:
        return {"ok": _do(request, stream)}
    except ProjectError as error:
        return {"error": error.to_json()}
    except Exception as error:
        for frame in traceback.extract_tb(error.__traceback__):
            print("%s:%s in %s" % (frame.filename, frame.lineno, frame.name), file=sys.stderr)
        print(type(error).__name__, file=sys.stderr)
        unreadable = ProjectError("answer_unreadable", host="agent", exit_code=1, reason=type(error).__name__)
        return {"error": unreadable.to_json()}


def _do(request: Any, stream: IO[bytes]) -> Dict[str, Any]:
    if not isinstance(request, dict):
        raise ProjectError("input_invalid", name="request", reason="must be an object")
    args, op = Arguments(request.get("args") or {}), request.get("op")
    if isinstance(op, str) and op in STREAM_OPS:
        return STREAM_OPS[op](args, stream)
    if not isinstance(op, str) or op not in OPS:
        raise ProjectError("input_invalid", name="op", reason="there is no such operation")
    return OPS[op](args)


def main(argv: Any) -> int:
    """Run one step of a setup; return its exit code."""
    if len(argv) != 3 or argv[0] != "step":
        print(__doc__, file=sys.stderr)
        return EXIT_INPUT
    from controller.boxside.setup_steps import run_step  # the agent answers without it

    return run_step(argv[1], argv[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
