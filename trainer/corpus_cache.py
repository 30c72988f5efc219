"""Encoded samples on the disk: made once by the first process, mapped into memory by all.

One Arrow file for each corpus, tokenizer, frame and window, below `processed/.encoded`. It holds texts as ids, so only
its owner can read it. Everything in it is checked before it is used; what is missing or damaged is made again.
Side effects: reads the samples, writes the file by rename, deletes all but the newest three.

    <digest>.arrow   batch 0: train, batch 1: validation
                     ids: large_list<int32>, is_trained: large_list<uint8>, weight: float, class_index: int8
                     metadata `zyforge`: {"left_out": [[id, reason]], "read": 471, "engine": "tiktoken", "reason": …}
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus_builder.errors import ProjectError
from corpus_builder.fast_tokens import FastTokens
from corpus_builder.frame import Frame
from corpus_builder.log_lines import log_line
from trainer.device import Place
from trainer.encode import SamplesFile, encode_corpus, read_samples
from trainer.encoded import EncodedCorpus, EncodedSet
from trainer.voice import Voice

FORMAT = 1  # part of every file's name: counts up when the layout or the meaning of a column changes
KEPT = 3
#: 1 GB of text takes about ten minutes with one thread of the slow engine.
DEADLINE_S = 3600.0
_POLL_S = 0.2
_SUFFIX = ".arrow"
_METADATA = b"zyforge"
_SCHEMA = pa.schema(
    [
        ("ids", pa.large_list(pa.int32())),
        ("is_trained", pa.large_list(pa.uint8())),
        ("weight", pa.float32()),
        ("class_index", pa.int8()),
    ]
)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a file holds: the corpus, and why its engine was used."""

    corpus: EncodedCorpus
    reason: str


def open_corpus(
    samples: SamplesFile,
    frame: Frame,
    folder: Path,
    *,
    tokens: FastTokens,
    max_seq_len: int,
    place: Place,
    voice: Voice,
    deadline_s: float = DEADLINE_S,
) -> EncodedCorpus:
    """Return the encoded corpus, mapped from its file; the first process makes the file where there is none.

    Args:
        folder: Where encoded corpora lie.
        tokens: What encodes, where something must be.
        deadline_s: How long other processes wait for the first.

    Raises:
        ProjectError: `encoding_not_done`; what `read_samples` and `encode_corpus` raise.
    """
    path = folder / f"{_key(samples, frame, max_seq_len)}{_SUFFIX}"
    if not place.is_first:
        return _wait_for(path, deadline_s).corpus
    opened = _load_known(path, voice)
    is_new = opened is None
    if opened is None:
        corpus = encode_corpus(read_samples(samples), frame, max_seq_len=max_seq_len, tokens=tokens)
        _save(corpus, tokens.reason, path)
        opened = _load(path)
    os.utime(path)
    _prune(folder, path)
    sentence = "encoded by {engine} ({reason}), every label proved" if is_new else (
        "encoded and proved before, by {engine} ({reason}): taken from {name}"
    )  # fmt: skip
    corpus = opened.corpus
    voice.say(log_line("train", sentence, engine=corpus.engine, reason=opened.reason, name=path.name))
    voice.event("engine", engine=corpus.engine, reason=opened.reason, cached=str(not is_new).lower())
    return corpus


def _key(samples: SamplesFile, frame: Frame, max_seq_len: int) -> str:
    """Return the digest of all that the ids depend on; the engine is not of it, since all give the same ids."""
    parts = [FORMAT, samples.sha256, frame.digest, max_seq_len]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _load_known(path: Path, voice: Voice) -> _Opened | None:
    """Return what `path` holds; None where there is nothing or it is damaged, which is said."""
    try:
        return _load(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:  # Arrow's own errors are such
        reason = type(error).__name__
        voice.say(log_line("train", "{name} is damaged ({reason}): encoding anew", name=path.name, reason=reason))
        return None


def _wait_for(path: Path, deadline_s: float) -> _Opened:
    until_s = time.monotonic() + deadline_s
    while True:
        try:
            return _load(path)
        except (OSError, ValueError, LookupError, TypeError) as error:  # not there yet, or damaged and soon replaced
            if time.monotonic() >= until_s:
                raise ProjectError("encoding_not_done", waited_s=round(deadline_s), path=str(path)) from error
        time.sleep(_POLL_S)


def _save(corpus: EncodedCorpus, reason: str, path: Path) -> None:
    """Write a corpus by rename. Not flushed to the disk: a file that a power cut tore is found out and made again."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    batches = [_batch(part) for part in (corpus.train, corpus.validation)]
    packed = {
        "left_out": corpus.left_out,
        "read": corpus.read,
        "engine": corpus.engine,
        "reason": reason,
        "checksums": [_checksum(part) for part in (corpus.train, corpus.validation)],
    }
    schema = _SCHEMA.with_metadata({_METADATA: json.dumps(packed)})
    with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    os.replace(partial, path)


def _batch(part: EncodedSet) -> Any:
    starts = _as_arrow(part.starts, pa.int64())
    columns = [
        pa.LargeListArray.from_arrays(starts, _as_arrow(part.ids, pa.int32())),
        pa.LargeListArray.from_arrays(starts, _as_arrow(part.is_trained, pa.uint8())),
        _as_arrow(part.weights, pa.float32()),
        _as_arrow(part.class_indices, pa.int8()),
    ]
    return pa.record_batch(columns, schema=_SCHEMA)


def _as_arrow(column: NDArray[Any], kind: Any) -> Any:
    """Return a column over the same memory; `pa.array` and `to_numpy` would import pandas on the way."""
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])


def _as_numpy(column: Any, dtype: type[np.generic]) -> NDArray[Any]:
    values = column.buffers()[1]
    whole = np.empty(0, dtype) if values is None or not values.size else np.frombuffer(values, dtype)
    return whole[column.offset : column.offset + len(column)]


def _load(path: Path) -> _Opened:
    """Return what a file holds, mapped; raise where it is not whole."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    if not reader.schema.equals(_SCHEMA):
        raise ValueError("other columns")
    packed = json.loads(reader.schema.metadata[_METADATA])
    train, validation = (_set_of(reader.get_batch(at)) for at in range(2))
    if [_checksum(train), _checksum(validation)] != packed["checksums"]:
        raise ValueError("other bytes")
    left_out = tuple((str(sample), str(reason)) for sample, reason in packed["left_out"])
    corpus = EncodedCorpus(train, validation, left_out, int(packed["read"]), str(packed["engine"]))
    return _Opened(corpus, str(packed["reason"]))


def _set_of(batch: Any) -> EncodedSet:
    batch.validate()
    ids, is_trained, weights, class_indices = batch.columns
    return EncodedSet(
        ids=_as_numpy(ids.values, np.int32),
        is_trained=_as_numpy(is_trained.values, np.bool_),
        starts=_as_numpy(ids.offsets, np.int64),
        weights=_as_numpy(weights, np.float32),
        class_indices=_as_numpy(class_indices, np.int8),
    )


def _checksum(part: EncodedSet) -> int:
    """Return the CRC of all arrays: they are mapped, so nobody has read them before."""
    found = 0
    for column in (part.ids, part.is_trained, part.starts, part.weights, part.class_indices):
        found = zlib.crc32(column.view(np.uint8).data, found)
    return found


def _prune(folder: Path, current: Path) -> None:
    """Delete all but the newest files, and what a killed process left half written."""
    others = sorted(
        (path for path in folder.glob(f"*{_SUFFIX}") if path != current), key=lambda path: -path.stat().st_mtime
    )
    for path in (*others[KEPT - 1 :], *folder.glob("*.partial")):
        path.unlink(missing_ok=True)
