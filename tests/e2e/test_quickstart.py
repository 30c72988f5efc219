"""The README's first command, run as a newcomer types it; `TINY=1` in the environment makes it quick."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.test_docs import ROOT, quickstart


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_quickstart_makes_everything_it_promises(tmp_path):
    command = quickstart(ROOT / "README.md")[0].split()
    out = tmp_path / "demo-out"
    environment = {**os.environ, "TINY": "1", "DEMO_OUT": str(out)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = (out / "summary.md").read_text("utf-8")
    assert "| soul |" in summary
    assert "/ 10 |" in summary
    manifest = json.loads((out / "coding-sft.manifest.json").read_text("utf-8"))
    assert {account["samples"] > 0 for account in manifest["classes"].values()} == {True}
    assert (out / "coding-sft.report.html").stat().st_size > 1000
    outcomes = [json.loads(path.read_text("utf-8")) for path in (out / "runs").glob("*/outcome.json")]
    assert [outcome["state"] for outcome in outcomes] == ["succeeded"]
    steps = [json.loads(line) for line in next(Path(out).glob("runs/*/progress.jsonl")).read_text("utf-8").splitlines()]
    assert steps[-1]["step"] == steps[-1]["total"] >= 100
