"""Who changed what on the box, and why we know: `audit.jsonl`. Side effects: that file.

Runs on the box: standard library and Python 3.8 only.

    {"at": "2026-05-03T10:15:00Z", "who": "alice", "action": "kill", "change": "kill now",
     "name": "20260503-101500-3fa1", "commit": "c0ffee…", "run_url": "https://…"}
"""

import json
import os

from controller.boxside.arguments import Arguments
from trainer.journal import now_utc
from trainer.run_paths import DataPaths


def append_audit(data: str, args: Arguments, change: str, name: str) -> bool:
    """Append a line; return whether there was room for it: no change on the box depends on that.

    The data folder of a kill may not even be there. The line after one that a full disk has torn begins anew.
    """
    row = {"at": now_utc(), "who": args.optional_text("owner"), "action": args.optional_text("action")}
    row.update(change=change, name=name, commit=args.optional_text("commit"), run_url=args.optional_text("run_url"))
    if not os.path.isdir(data):
        return False
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    try:
        with open(os.open(DataPaths(data).audit, flags, 0o600), "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = b"" if size == 0 or file.read(1) == b"\n" else b"\n"
            line = torn + json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            return file.write(line) == len(line)
    except OSError:
        return False
