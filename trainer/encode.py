"""Samples -> rows of ids, labels and a weight. Side effects: reads the samples file and its manifest.

Labels are right by construction (`frame.py`) and checked on every sample by a scan of the ids (`mask.py`). A
sample on which both disagree, or that teaches nothing, is left out, counted and named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from corpus_builder.errors import ProjectError
from corpus_builder.frame import IGNORE_INDEX, Frame, Segment
from corpus_builder.manifest import Manifest, check_gates, load_manifest
from corpus_builder.mask import build_assistant_mask
from corpus_builder.sample import CLASSES, Sample, parse_sample

MAX_DISAGREE_SHARE = 0.001  # more than this and the run stops before its first step (issue 4, item 1)
DISAGREE, NOTHING_TRAINED = "labels_disagree", "nothing_trained"
MANIFEST_SUFFIX = ".manifest.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One encoded sample: `ids` and `labels` (T,), labels IGNORE_INDEX where nothing is learned, not shifted.

    `class_index` counts in `corpus_builder.sample.CLASSES`.
    """

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    weight: float
    class_index: int

    @property
    def trained(self) -> int:
        """Tokens that are learned; the first token of a row has nothing before it and never is."""
        return sum(label != IGNORE_INDEX for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class EncodedCorpus:
    """What will be trained. `left_out`: (sample id, reason), every sample that is not among `rows`."""

    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]
    read: int
    validation: int  # samples of the held-out split, not trained

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.ids) for row in self.rows)

    @property
    def trained_tokens(self) -> int:
        """Tokens that are learned."""
        return sum(row.trained for row in self.rows)


def manifest_path(samples_path: Path) -> Path:
    """Return where the manifest of a samples file lies: `coding-sft.jsonl` -> `coding-sft.manifest.json`."""
    return samples_path.with_name(samples_path.stem + MANIFEST_SUFFIX)


def check_samples(samples_path: Path, *, is_own: bool, meant_sha256: str | None = None) -> Manifest | None:
    """Return the manifest beside the samples, None where a foreign file has none.

    Args:
        is_own: The file is the built corpus, not a `data_path`; then it must have a manifest.
        meant_sha256: Digest of the corpus that the run was started for: another setup may have come between.

    Raises:
        ProjectError: `config_unreadable`, `samples_changed`, `gate_failed`.
    """
    beside = manifest_path(samples_path)
    if not is_own and not beside.exists():
        return None
    manifest = load_manifest(beside)
    if _sha256(samples_path) != manifest.samples_sha256 or meant_sha256 not in (None, manifest.samples_sha256):
        raise ProjectError("samples_changed", path=str(samples_path))
    check_gates(manifest)
    return manifest


def read_samples(samples_path: Path) -> list[Sample]:
    """Return the samples of a file, in order; raise `config_unreadable`, `sample_invalid` or `zero_samples`."""
    try:
        with samples_path.open(encoding="utf-8") as file:
            samples = [
                parse_sample(line, path=samples_path.name, line_number=number)
                for number, line in enumerate(file, 1)
                if line.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise ProjectError("config_unreadable", path=str(samples_path), reason=type(error).__name__) from error
    if not samples:
        raise ProjectError("zero_samples", path=str(samples_path))
    return samples


def encode_corpus(samples: Sequence[Sample], frame: Frame, *, max_seq_len: int) -> EncodedCorpus:
    """Return the rows of all training samples; each content is encoded once, all in one batch.

    Raises:
        ProjectError: `sample_too_long`; `labels_disagree` when more than 0.1 % of the samples do; `zero_samples`.
    """
    trained = [sample for sample in samples if sample.split == "train"]
    ids_of = _encode_contents(trained, frame)
    rows: list[Row] = []
    left_out: list[tuple[str, str]] = []
    for sample in trained:
        row, reason = _encode_sample(sample, frame, ids_of)
        if len(row.ids) > max_seq_len:
            raise ProjectError("sample_too_long", sample=sample.id, tokens=len(row.ids), limit=max_seq_len)
        if reason is None:
            rows.append(row)
        else:
            left_out.append((sample.id, reason))
    _check_left_out(left_out, len(trained))
    if not rows:
        raise ProjectError("zero_samples", path="samples")
    return EncodedCorpus(tuple(rows), tuple(left_out), len(samples), len(samples) - len(trained))


def _encode_contents(samples: Iterable[Sample], frame: Frame) -> Callable[[str], Sequence[int]]:
    contents = list(dict.fromkeys(message.content for sample in samples for message in sample.messages))
    return dict(zip(contents, frame.encode_texts(contents), strict=True)).__getitem__


def _encode_sample(sample: Sample, frame: Frame, ids_of: Callable[[str], Sequence[int]]) -> tuple[Row, str | None]:
    """Return the row of a sample and why it can't be trained, None when it can."""
    segments = frame.segments(sample.messages, ids_of)
    row = Row(
        ids=tuple(chain.from_iterable(part.ids for part in segments)),
        labels=tuple(
            chain.from_iterable(part.ids if part.is_trained else (IGNORE_INDEX,) * len(part.ids) for part in segments)
        ),
        weight=sample.weight,
        class_index=CLASSES.index(sample.sample_class),
    )
    if not scan_agrees(row.ids, segments, frame):
        return row, DISAGREE
    return row, None if row.trained else NOTHING_TRAINED


def scan_agrees(ids: Sequence[int], segments: Sequence[Segment], frame: Frame) -> bool:
    """Whether a scan of `ids` finds exactly the assistant turns that `segments` were made of."""
    made = list(chain.from_iterable([part.is_answer] * len(part.ids) for part in segments))
    header = frame.headers["assistant"][1:]
    return build_assistant_mask(ids, im_start=frame.im_start, im_end=frame.im_end, assistant_header=header) == made


def _check_left_out(left_out: Sequence[tuple[str, str]], total: int) -> None:
    disagree = sum(reason == DISAGREE for _, reason in left_out)
    if disagree > MAX_DISAGREE_SHARE * total:
        raise ProjectError("labels_disagree", count=disagree, total=total)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ProjectError("config_unreadable", path=str(path), reason=type(error).__name__) from error
    return digest.hexdigest()
