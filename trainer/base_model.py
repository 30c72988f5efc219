"""Is a Hugging Face model folder whole? Looks at files only; no weights are loaded. Side effects: reads the folder.

Runs on the box too: standard library and Python 3.8 only, before any environment exists.

    >>> find_model_faults("/data/base")
    [Fault(code='base_model_incomplete', file='model-00002-of-00004.safetensors')]
"""

import json
import os
import struct
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from corpus_builder.errors import ProjectError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLED_WEIGHTS = "pytorch_model.bin"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True)
class Fault:
    """What is wrong with a model folder: an error code of `errors.py`, and the file that lacks or is broken."""

    code: str
    file: str


def find_model_faults(folder: str) -> List[Fault]:
    """Return every fault of a model folder, empty when it can be loaded; the gravest first."""
    if not os.path.isdir(folder):
        return [Fault("base_model_missing", "")]
    faults = []
    if _read_json(os.path.join(folder, CONFIG)) is None:
        faults.append(Fault("base_model_no_config", CONFIG))
    faults += [Fault("base_model_incomplete", name) for name in _find_bad_weights(folder)]
    if _read_json(os.path.join(folder, TOKENIZER)) is None:
        faults.append(Fault("tokenizer_missing", TOKENIZER))
    return faults


def check_base_model(folder: str) -> None:
    """Raise the gravest fault of a model folder as a `ProjectError`; all missing weights are named together."""
    faults = find_model_faults(folder)
    if not faults:
        return
    code = faults[0].code
    if code == "base_model_incomplete":
        names = [fault.file for fault in faults if fault.code == code]
        raise ProjectError(code, path=folder, missing=", ".join(names))
    raise ProjectError(code, path=folder)


def _find_bad_weights(folder: str) -> List[str]:
    """Return the weight files that are missing or cut short."""
    for index in INDEXES:
        path = os.path.join(folder, index)
        if os.path.exists(path):
            names = _indexed_files(path)
            return [index] if not names else [name for name in names if not _is_whole(os.path.join(folder, name))]
    for name in (WEIGHTS, PICKLED_WEIGHTS):
        if os.path.exists(os.path.join(folder, name)):
            return [] if _is_whole(os.path.join(folder, name)) else [name]
    return [WEIGHTS]


def _indexed_files(path: str) -> List[str]:
    """Return the files that an index names, sorted; empty when the index is broken."""
    packed = _read_json(path)
    weight_map = packed.get("weight_map") if packed is not None else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        return []
    return sorted(set(weight_map.values()))


def _is_whole(path: str) -> bool:
    """Whether a weight file exists and, for safetensors, has exactly the bytes that its header announces."""
    try:
        size_bytes = os.path.getsize(path)
        return size_bytes == _announced_bytes(path) if path.endswith(".safetensors") else size_bytes > 0
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return False


def _announced_bytes(path: str) -> int:
    """Return the size of a safetensors file by its own header.

    Source: the format: 8 bytes little-endian length, a JSON header, then the tensors; offsets count from there.
    """
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError("header of %d bytes" % header_bytes)
        header = json.loads(file.read(header_bytes).decode("utf-8"))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return 8 + int(header_bytes) + max(ends, default=0)


def _read_json(path: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object in a file, None when it is missing or broken."""
    try:
        with open(path, encoding="utf-8") as file:
            packed = json.load(file)
    except (OSError, ValueError):
        return None
    return packed if isinstance(packed, dict) else None
