"""Is a Hugging Face model folder, or PEFT's adapter folder, whole? Looks at files only; no weights are loaded.

Side effects: reads the folder.

Runs on the box too: standard library and Python 3.8 only, before any environment exists.

    >>> find_model_faults("/data/base")
    [Fault(code='base_model_incomplete', file='model-00002-of-00004.safetensors')]
"""

import json
import os
import struct
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from corpus_builder.errors import ProjectError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLED_WEIGHTS = "pytorch_model.bin"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True)
class Fault:
    """What is wrong with a model folder: an error code of `errors.py`, and the file that lacks or is broken."""

    code: str
    file: str


def is_adapter(folder: str) -> bool:
    """Whether a folder holds an adapter (PEFT's layout), which needs its base model to be used."""
    return os.path.exists(os.path.join(folder, ADAPTER_CONFIG)) and not os.path.exists(os.path.join(folder, CONFIG))


def find_model_faults(folder: str) -> List[Fault]:
    """Return every fault of a model's or an adapter's folder, empty when it can be loaded; the gravest first."""
    if not os.path.isdir(folder):
        return [Fault("base_model_missing", "")]
    faults = find_adapter_faults(folder) if is_adapter(folder) else _find_whole_model_faults(folder)
    if not _is_json_object(os.path.join(folder, TOKENIZER)):
        faults.append(Fault("tokenizer_missing", TOKENIZER))
    return faults


def find_adapter_faults(folder: str) -> List[Fault]:
    """Return the faults of an adapter's own two files; a tokenizer is not asked for."""
    faults = []
    if _read_json(os.path.join(folder, ADAPTER_CONFIG)) is None:
        faults.append(Fault("base_model_no_config", ADAPTER_CONFIG))
    faults += [Fault("base_model_incomplete", name) for name in _find_bad_file(folder, ADAPTER_WEIGHTS)]
    return faults


def _find_whole_model_faults(folder: str) -> List[Fault]:
    faults = []
    if _read_json(os.path.join(folder, CONFIG)) is None:
        faults.append(Fault("base_model_no_config", CONFIG))
    return faults + [Fault("base_model_incomplete", name) for name in _find_bad_weights(folder)]


def check_base_model(folder: str) -> None:
    """Raise the gravest fault of a model folder as a `ProjectError`; all missing weights are named together.

    An adapter's folder is no base model, and is refused by that name.
    """
    if is_adapter(folder):
        raise ProjectError("base_model_is_adapter", path=folder)
    _raise_gravest(find_model_faults(folder), folder)


def check_adapter(folder: str) -> None:
    """Raise the gravest fault of an adapter's folder as a `ProjectError`."""
    _raise_gravest(find_model_faults(folder), folder)


def _raise_gravest(faults: List[Fault], folder: str) -> None:
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
    return _find_bad_file(folder, (WEIGHTS, PICKLED_WEIGHTS))


def _find_bad_file(folder: str, names: Tuple[str, ...]) -> List[str]:
    """Return the first of the files that exists, if it is cut short; the first of all, if none exists."""
    for name in names:
        if os.path.exists(os.path.join(folder, name)):
            return [] if _is_whole(os.path.join(folder, name)) else [name]
    return [names[0]]


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


def _is_json_object(path: str) -> bool:
    """Whether a file begins and ends as a JSON object: a tokenizer has millions of bytes, and is read elsewhere."""
    try:
        with open(path, "rb") as file:
            head = file.read(64).lstrip()
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
            return head[:1] == b"{" and file.read().rstrip()[-1:] == b"}"
    except OSError:
        return False


def _read_json(path: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object in a file, None when it is missing or broken."""
    try:
        with open(path, encoding="utf-8") as file:
            packed = json.load(file)
    except (OSError, ValueError):
        return None
    return packed if isinstance(packed, dict) else None
