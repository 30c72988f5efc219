"""Expected failures: one code per failure, its exit code, and values that carry their privacy class. Pure.

Runs on the box too: standard library and Python 3.8 only. The words belong to `say.py`; the box sends
codes and values, the runner says them.

    >>> ProjectError("box_unreachable", host="gpu-1:22", reason="timed out").exit_code
    3
"""

import json
from typing import Any, Dict, Mapping, Optional, Union

EXIT_DONE = 0
EXIT_INPUT = 2
EXIT_UNREACHABLE = 3
EXIT_UNFIT = 4
EXIT_DEADLINE = 5
EXIT_RUN_FAILED = 6
EXIT_GATE = 7
EXIT_REFUSED = 8
EXIT_NOT_READY = 9

#: Every code, with its exit code (design 4.7). A row here needs three lines in each catalogue (`say.py`).
EXIT_CODES: Dict[str, int] = {
    # input wrong
    "setting_missing": EXIT_INPUT,
    "setting_invalid": EXIT_INPUT,
    "input_invalid": EXIT_INPUT,
    "action_unknown": EXIT_INPUT,
    "url_with_query": EXIT_INPUT,
    "url_refused": EXIT_INPUT,
    "extra_missing": EXIT_INPUT,
    "config_unreadable": EXIT_INPUT,
    "config_invalid": EXIT_INPUT,
    "override_unknown": EXIT_INPUT,
    "override_invalid": EXIT_INPUT,
    "few_steps": EXIT_INPUT,
    "key_invalid": EXIT_INPUT,
    "known_hosts_invalid": EXIT_INPUT,
    "source_link_leaves_root": EXIT_INPUT,
    "storage_failed": EXIT_INPUT,
    "storage_denied": EXIT_INPUT,
    "storage_expired": EXIT_INPUT,
    "storage_missing": EXIT_INPUT,
    "storage_clock_skew": EXIT_INPUT,
    "dialog_zip_missing": EXIT_INPUT,
    "dialog_zip_unreadable": EXIT_INPUT,
    "dialog_zip_not_zip": EXIT_INPUT,
    "archive_refused": EXIT_INPUT,
    "text_unreadable": EXIT_INPUT,
    "base_model_missing": EXIT_INPUT,
    "base_model_no_config": EXIT_INPUT,
    "base_model_incomplete": EXIT_INPUT,
    "base_model_is_adapter": EXIT_INPUT,
    "base_model_unsafe": EXIT_INPUT,
    "tokenizer_missing": EXIT_INPUT,
    "template_unknown": EXIT_INPUT,
    "template_mismatch": EXIT_INPUT,
    "checkpoint_missing": EXIT_INPUT,
    "checkpoint_corrupt": EXIT_INPUT,
    "checkpoint_model_only": EXIT_INPUT,
    "ranks_changed": EXIT_INPUT,
    "base_is_stock": EXIT_INPUT,
    "base_did_not_answer": EXIT_INPUT,
    "template_unrenderable": EXIT_INPUT,
    "lora_no_targets": EXIT_INPUT,
    "no_validation": EXIT_INPUT,
    "tracker_missing": EXIT_INPUT,
    "sample_invalid": EXIT_INPUT,
    "sample_too_long": EXIT_INPUT,
    "suite_not_unseen": EXIT_INPUT,
    "window_too_small": EXIT_INPUT,
    "manifest_unbalanced": EXIT_INPUT,
    "samples_changed": EXIT_INPUT,
    "doctor_inputs": EXIT_INPUT,
    # box unreachable, or not the pinned one
    "box_unreachable": EXIT_UNREACHABLE,
    "host_key_unknown": EXIT_UNREACHABLE,
    "host_key_mismatch": EXIT_UNREACHABLE,
    "login_refused": EXIT_UNREACHABLE,
    "connection_lost": EXIT_UNREACHABLE,
    "answer_unreadable": EXIT_UNREACHABLE,
    "doctor_unreachable": EXIT_UNREACHABLE,
    # box unfit
    "box_no_python": EXIT_UNFIT,
    "box_not_writable": EXIT_UNFIT,
    "box_disk_full": EXIT_UNFIT,
    "environment_failed": EXIT_UNFIT,
    "environment_unusable": EXIT_UNFIT,
    "smoke_failed": EXIT_UNFIT,
    "precision_unsupported": EXIT_UNFIT,
    "gpus_missing": EXIT_UNFIT,
    "gpus_busy": EXIT_UNFIT,
    "memory_short": EXIT_UNFIT,
    "disk_short": EXIT_UNFIT,
    "method_unsupported": EXIT_UNFIT,
    "release_corrupt": EXIT_UNFIT,
    "doctor_unfit": EXIT_UNFIT,
    # deadline passed, the work goes on
    "deadline_passed": EXIT_DEADLINE,
    # run failed
    "setup_failed": EXIT_RUN_FAILED,
    "training_not_started": EXIT_RUN_FAILED,
    "run_failed": EXIT_RUN_FAILED,
    "run_not_found": EXIT_RUN_FAILED,
    "labels_disagree": EXIT_RUN_FAILED,
    "loss_not_finite": EXIT_RUN_FAILED,
    "gradient_not_finite": EXIT_RUN_FAILED,
    "loss_scale_minimum": EXIT_RUN_FAILED,
    "too_many_skipped": EXIT_RUN_FAILED,
    "encoding_not_done": EXIT_RUN_FAILED,
    "merge_differs": EXIT_RUN_FAILED,
    "final_incomplete": EXIT_RUN_FAILED,
    "kill_incomplete": EXIT_RUN_FAILED,
    "gpu_memory_held": EXIT_RUN_FAILED,
    "gpu_memory_orphaned": EXIT_RUN_FAILED,
    "session_vanished": EXIT_RUN_FAILED,
    # corpus gate failed
    "gate_failed": EXIT_GATE,
    "zero_samples": EXIT_GATE,
    "corpus_missing": EXIT_GATE,
    # refused
    "not_confirmed": EXIT_REFUSED,
    "lock_held": EXIT_REFUSED,
    # acceptance
    "not_ready": EXIT_NOT_READY,
    "not_taught": EXIT_NOT_READY,
}

PUBLIC = "public"
NAMED = "named"
TEXT = "text"


class Named(str):
    """A value of the privacy class *named*: a file name, a speaker's name."""

    __slots__ = ()


class Text(str):
    """A value of the privacy class *text*: something that a person wrote or the model said."""

    __slots__ = ()


Value = Union[str, int, float]


def privacy_class(value: Value) -> str:
    """Return `public`, `named` or `text` for a value of an error, gate or log line."""
    if isinstance(value, Text):
        return TEXT
    return NAMED if isinstance(value, Named) else PUBLIC


def pack_values(values: Mapping[str, Value]) -> Dict[str, Any]:
    """Return JSON-ready values that keep their class: `{"path": {"named": "a.md"}, "count": 3}`."""
    return {
        key: value if privacy_class(value) == PUBLIC else {privacy_class(value): str(value)}
        for key, value in values.items()
    }


def unpack_values(packed: Mapping[str, Any]) -> Dict[str, Value]:
    """Return the values that `pack_values` packed."""
    values: Dict[str, Value] = {}
    for key, value in packed.items():
        if isinstance(value, dict):
            kind, text = next(iter(value.items()))
            values[key] = Text(text) if kind == TEXT else Named(text)
        else:
            values[key] = value
    return values


class ProjectError(Exception):
    """An expected failure: a code, its values and an exit code; the command line says it without a traceback."""

    def __init__(self, code: str, **values: Value) -> None:
        if code not in EXIT_CODES:
            raise KeyError("no such error code: %s" % code)
        self.code = code
        self.values = values
        super().__init__("%s %s" % (code, " ".join("%s=%s" % (key, _shown(value)) for key, value in values.items())))

    @property
    def exit_code(self) -> int:
        """The process exit code of this failure (design 4.7)."""
        return EXIT_CODES[self.code]

    def to_json(self) -> Dict[str, Any]:
        """Return `{"code", "values"}` for a file or an answer."""
        return {"code": self.code, "values": pack_values(self.values)}

    @classmethod
    def from_json(cls, packed: Mapping[str, Any]) -> "ProjectError":
        """Return the error that `to_json` packed."""
        return cls(packed["code"], **unpack_values(packed["values"]))


def _shown(value: Value) -> str:
    """Keep text out of tracebacks and logs: only its length is shown."""
    return "<%d characters>" % len(value) if isinstance(value, Text) else str(value)


ERROR_PREFIX = "ZY_ERROR "


def format_error_line(error: ProjectError) -> str:
    """Return the line by which a child process tells its supervisor why it ended; JSON, values with their class."""
    return ERROR_PREFIX + json.dumps(error.to_json(), ensure_ascii=True)


def parse_error_line(line: str) -> Optional[ProjectError]:
    """Return the error of a line that `format_error_line` made, None for any other line."""
    if not line.startswith(ERROR_PREFIX):
        return None
    try:
        return ProjectError.from_json(json.loads(line[len(ERROR_PREFIX) :]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
