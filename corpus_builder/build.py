"""The recipe page: sources -> samples, report and manifest. Run as `python -m corpus_builder.build REQUEST.json`.

Side effects: reads the sources, writes the three files (samples by rename, the manifest last), logs to stdout; a
failure is one line on stderr (`errors.format_error_line`). A corpus without a manifest is none: an earlier manifest
goes before the first sample is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from corpus_builder.assemble import Assembler
from corpus_builder.collect import Collector
from corpus_builder.errors import ProjectError, format_error_line
from corpus_builder.frame import load_frame
from corpus_builder.gates import judge_gates
from corpus_builder.log_lines import log_line
from corpus_builder.manifest import Manifest, check_gates, save_manifest
from corpus_builder.report import format_report
from corpus_builder.request import Request, load_request
from corpus_builder.samples_file import SamplesFile
from corpus_builder.suite import Suite


def build(request: Request) -> Manifest:
    """Build the corpus and return its manifest; samples, report and manifest are written, whatever the gates say."""
    plan = request.plan
    request.manifest.unlink(missing_ok=True)
    frame = load_frame(request.base_model_dir)
    assembler = Assembler(plan, frame, max_seq_len=request.max_seq_len, suite=request.suite)
    with SamplesFile(request.samples) as samples:
        collector = Collector(request, assembler, samples)
        collector.add_sources()
        _check_suite(request.suite, assembler.questions_found)
    classes = assembler.classes()
    gates = judge_gates(
        plan,
        soul=collector.soul,
        samples={name: account.samples for name, account in classes.items()},
        rounds=collector.rounds,
    )
    manifest = Manifest(
        plan_name=plan.name,
        plan_digest=hashlib.sha256(json.dumps(plan.model_dump(mode="json"), sort_keys=True).encode()).hexdigest(),
        tokenizer=frame.digest,
        max_seq_len=request.max_seq_len,
        files=tuple(assembler.files),
        missing=tuple(collector.missing),
        classes=classes,
        gates=gates,
        samples_sha256=samples.sha256,
    )
    save_report(format_report(manifest, request.lang), request.report)
    save_manifest(manifest, request.manifest)
    _log_totals(manifest)
    return manifest


def _check_suite(suite: Suite | None, found: set[int]) -> None:
    """Raise `suite_not_unseen` if the corpus asks a question of the suite."""
    if suite is not None and found:
        numbers = ", ".join(str(number) for number in sorted(found))
        print(log_line("corpus", "questions of the suite in the corpus: {numbers}", numbers=numbers), flush=True)
        raise ProjectError("suite_not_unseen", suite=suite.name, count=len(found))


def save_report(page: str, path: Path) -> None:
    """Write the report by rename; only its owner can read it."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(page)
    os.replace(partial, path)


def _log_totals(manifest: Manifest) -> None:
    for name, account in manifest.classes.items():
        print(
            log_line(
                "corpus",
                "{name}: {samples} sample(s), {unique} unique, {tokens} tokens, {trained} trained, {lost} lost",
                name=name, samples=account.samples, unique=account.unique, tokens=account.tokens,
                trained=account.trained_tokens, lost=account.lost_tokens,
            ),
            flush=True,
        )  # fmt: skip
    for gate in manifest.gates:
        print(
            log_line(
                "corpus", "gate {name}: {verdict}, {found} found, {wanted} wanted",
                name=gate.name, verdict=gate.verdict, found=f"{gate.found:g}", wanted=f"{gate.wanted:g}",
            ),
            flush=True,
        )  # fmt: skip


def check_fit(manifest: Manifest, samples: Path) -> None:
    """Raise `zero_samples` or `gate_failed` unless the corpus may be trained on."""
    if manifest.total_samples == 0:
        raise ProjectError("zero_samples", path=str(samples))
    check_gates(manifest)


def main(argv: Sequence[str]) -> int:
    """Build the corpus of the request in `argv[0]` and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # whatever the box's locale is
    try:
        request = load_request(Path(argv[0]))
        check_fit(build(request), request.samples)
    except ProjectError as error:
        print(format_error_line(error), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
