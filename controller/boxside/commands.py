"""What steps of a setup share: a line of their log, a command and what it inherits. Side effects: processes, stdout.

Runs on the box: standard library and Python 3.8 only.
"""

import os
import subprocess
from typing import Any, Dict, Mapping, Optional, Sequence

from controller.boxside.environment import for_installers
from corpus_builder.log_lines import log_line
from trainer.build_locks import EXTENSIONS_DIR, extensions_dir


def say(tag: str, sentence: str, **values: Any) -> None:
    """Print one line of our log."""
    print(log_line(tag, sentence, **values), flush=True)


def run_command(argv: Sequence[str], environment: Mapping[str, str], timeout_s: Optional[float] = None) -> int:
    """Return the exit code of a command; a signal counts as 128 and its number, as in a shell.

    Raises:
        subprocess.TimeoutExpired: it did not end within `timeout_s` seconds, and was killed.
    """
    code = subprocess.run(list(argv), env=dict(environment), stdin=subprocess.DEVNULL, timeout=timeout_s).returncode
    return code if code >= 0 else 128 - code


def clean_environment() -> Dict[str, str]:
    """Return our environment without the path to our code, which is nothing to install beside."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    return for_installers(kept)


def environment_of(python: str, overlay: Optional[str]) -> Dict[str, str]:
    """Return our environment as a child of an interpreter has it: its tools first, its extensions, what it lacked."""
    tools = [os.path.dirname(python), os.environ.get("PATH", os.defpath)]
    paths = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    if overlay is not None:
        tools.insert(1, os.path.join(overlay, "bin"))
        paths.append(overlay)
    told = dict(os.environ, PATH=os.pathsep.join(tools))
    told[EXTENSIONS_DIR] = extensions_dir(python)
    if paths:
        told["PYTHONPATH"] = os.pathsep.join(paths)
    return told
