"""Known failures: a pattern in a log, its cause, what helps, and where that is known from. Pure.

Runs on the box too: standard library and Python 3.8 only. A row's words are `remedy.<code>` in the catalogues.
"""

import re
from dataclasses import dataclass
from typing import Optional, Pattern, Tuple


@dataclass(frozen=True)
class Remedy:
    """One known failure. `source` names the document behind the row."""

    code: str
    pattern: Pattern[str]
    source: str


def _row(code: str, pattern: str, source: str) -> Remedy:
    return Remedy(code, re.compile(pattern), source)


#: First match wins, so the narrow rows stand before the wide ones.
REMEDIES: Tuple[Remedy, ...] = (
    _row("cuda_oom", r"CUDA out of memory|torch\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", "seed 004, section 4"),
    _row(
        "host_oom",
        r"exits with return code = -9\b|DefaultCPUAllocator: can't allocate memory|MemoryError",
        "DeepSpeed's launcher",
    ),
    _row("disk_full", r"No space left on device|\[Errno 28\]", "errno(3)"),
    _row(
        "no_compiler",
        r"Ninja is required to load C\+\+ extensions|CUDA_HOME does not exist|No such file or directory: 'c\+\+'",
        "torch.utils.cpp_extension",
    ),
    _row("bf16_unsupported", r"bf16.{0,60}(not supported|requires)|BFloat16 is not supported", "seed 004, section 1"),
    _row("nan_loss", r"loss_not_finite|ZY_EVENT name=nan_stopped", "seed 004, section 4"),
    _row("loss_scale_minimum", r"Current loss scale already at minimum", "deepspeed/runtime/fp16/loss_scaler.py"),
    _row("labels_disagree", r"labels_disagree", "seed 004, section 4"),
    _row(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout|NCCL.{0,40}(timeout|unhandled system error)",
        "torch.distributed",
    ),
    _row(
        "driver_lost",
        r"NVRM: Xid|CUDA driver version is insufficient|no CUDA-capable device is detected",
        "NVIDIA Xid errors",
    ),
    _row("port_in_use", r"EADDRINUSE|Address already in use", "torch.distributed"),
    _row(
        "shard_missing",
        r"does not appear to have a file named|No such file or directory: .{0,200}\.safetensors",
        "transformers",
    ),
)


def find_remedy(log_text: str) -> Optional[Remedy]:
    """Return the first known failure that `log_text` shows, or None."""
    return next((remedy for remedy in REMEDIES if remedy.pattern.search(log_text)), None)
