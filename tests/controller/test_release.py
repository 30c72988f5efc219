"""A release holds our code and what the plan names, always in the same bytes; the agent fits into one request."""

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from controller.boxside.release_digest import release_digest
from controller.release import (
    AGENT_MODULES,
    CODE_ROOT,
    MAX_BUNDLE_BYTES,
    ONLY_STEPS,
    Release,
    agent_bundle,
    code_files,
    gather,
    source_files,
)
from corpus_builder.errors import ProjectError
from corpus_builder.plan import Plan


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A small tree of the four folders, no checkout of git's."""
    root = tmp_path / "code"
    for name in ("corpus_builder/a.py", "trainer/b.py", "controller/boxside/c.py", "configs/d.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for name in ("controller/__pycache__/c.pyc", "controller/__pycache__/x.py", "configs/key.pem", "docs/e.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("stays here")
    return root


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    for name in ("docs/one.md", "docs/二.md", ".github/brain/cores/x.md", "tool.jsonl", "secret.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o700)
    return root


def plan_of(*paths: str, globs: tuple[str, ...] = (), tool: str = "tool.jsonl") -> Plan:
    soul = {"kind": "soul", "paths": paths, "globs": globs, "questions": {"whole": ["q"], "section": ["q"]}}
    speakers = {"user": ["u"], "assistant": ["a"]}
    sources = [soul, {"kind": "dialog"}, {"kind": "tool", "path": tool}]
    return Plan.model_validate({"name": "t", "speakers": speakers, "sources": sources})


def unpacked(release: Release) -> dict[str, bytes]:
    contents = io.BytesIO(gzip.decompress(b"".join(release.stream())))
    found = {row["path"]: contents.read(row["size"]) for row in release.files()}
    assert contents.read() == b""
    return found


def test_it_holds_the_code_and_what_the_plan_names(code, repo):
    release = gather(code, repo, plan_of("docs/one.md", "docs/missing.md", "run.sh", globs=(".github/brain/*/*.md",)))
    assert [row["path"] for row in release.files()] == [
        "code/configs/d.yaml",
        "code/controller/boxside/c.py",
        "code/corpus_builder/a.py",
        "code/trainer/b.py",
        "sources/.github/brain/cores/x.md",
        "sources/docs/one.md",
        "sources/run.sh",
        "sources/tool.jsonl",
    ]


def test_what_arrives_is_what_was_announced(code, repo):
    release = gather(code, repo, plan_of("docs/二.md", "run.sh"))
    arrived = unpacked(release)
    assert list(arrived) == [row["path"] for row in release.files()]
    for row in release.files():
        content = arrived[row["path"]]
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (row["sha256"], row["size"])
    assert {row["path"]: row["mode"] for row in release.files()}["sources/run.sh"] == 0o755
    assert release_digest(release.files()) == release.digest


def test_the_same_content_has_the_same_digest_and_bytes(code, repo, tmp_path):
    first = gather(code, repo, plan_of("docs/one.md"))
    copy = shutil.copytree(repo, tmp_path / "elsewhere")
    os.utime(copy / "docs/one.md", (1, 1))
    (copy / "docs/one.md").chmod(0o600)
    second = gather(code, copy, plan_of("docs/one.md"))
    assert second.digest == first.digest
    assert b"".join(second.stream()) == b"".join(first.stream())
    (copy / "docs/one.md").write_text("changed")
    assert gather(code, copy, plan_of("docs/one.md")).digest != first.digest


def test_long_names_survive(code, repo):
    name = "docs/" + "很长的名字" * 15 + ".md"
    (repo / name).write_text("x")
    assert f"sources/{name}" in unpacked(gather(code, repo, plan_of(name)))


@pytest.mark.parametrize("target", ["/etc/passwd", "../../etc/passwd", "/nowhere/at/all"])
def test_a_link_that_leaves_the_root_is_refused_by_name(code, repo, target):
    (repo / "docs/link.md").symlink_to(target)
    with pytest.raises(ProjectError, match=r"source_link_leaves_root .*docs/link\.md") as caught:
        gather(code, repo, plan_of(globs=("docs/*.md",)))
    assert caught.value.exit_code == 2


def test_a_folder_that_is_a_link_out_of_the_root_is_refused(code, repo):
    (repo / "etc").symlink_to("/etc")
    with pytest.raises(ProjectError, match="source_link_leaves_root"):
        gather(code, repo, plan_of("etc/passwd"))


def test_a_link_inside_the_root_arrives_as_a_file(code, repo):
    (repo / "docs/link.md").symlink_to("one.md")
    (repo / "docs/dangling.md").symlink_to("not-there.md")
    arrived = unpacked(gather(code, repo, plan_of(globs=("docs/*.md",))))
    assert arrived["sources/docs/link.md"] == b"text of docs/one.md\n"
    assert "sources/docs/dangling.md" not in arrived


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/passwd", "docs/../../x", ""])
def test_a_path_that_leaves_the_root_is_a_wrong_plan(code, repo, path):
    for plan in (plan_of(path), plan_of(globs=(path,)), plan_of(tool=path)):
        with pytest.raises(ProjectError, match="config_invalid"):
            gather(code, repo, plan)


def test_a_file_that_changes_under_way_is_noticed(code, repo):
    release = gather(code, repo, plan_of("docs/one.md"))
    for text in ("text of docs/ONE.md\n", "shorter", "text of docs/one.md\nand longer"):
        (repo / "docs/one.md").write_text(text)
        with pytest.raises(ProjectError, match=r"release_corrupt .*docs/one\.md"):
            b"".join(release.stream())


def test_in_a_checkout_git_decides(code):
    git = ["git", "-C", str(code), "-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.excludesFile=/dev/null"]
    subprocess.run([*git, "init", "-q"], check=True)
    (code / ".gitignore").write_text("ignored.py\n")
    (code / "trainer/ignored.py").write_text("")
    (code / "trainer/new.py").write_text("")
    subprocess.run([*git, "add", "configs", "trainer/b.py"], check=True)
    listed = code_files(code)
    assert {"configs/d.yaml", "trainer/b.py"} <= set(listed)
    assert not {"trainer/new.py", "trainer/ignored.py", "configs/key.pem", "docs/e.py"} & set(listed)
    (code / "trainer/b.py").unlink()
    assert "code/trainer/b.py" not in [row["path"] for row in gather(code, code, plan_of()).files()]


def test_exports_of_the_repository_travel_and_those_of_the_archive_do_not(repo):
    for name in ("data/a.jsonl", "data/b.jsonl", "conversations.json"):
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text("x")
    here = {"kind": "messages", "files": ["data/*.jsonl"], "place": "repo"}
    there = {"kind": "chatgpt", "files": ["*.json"]}
    plan = plan_of().model_dump(mode="json") | {"sources": [here, there]}
    assert source_files(repo, Plan.model_validate(plan)) == ["data/a.jsonl", "data/b.jsonl"]


def test_our_own_code_is_a_release():
    names = {row["path"] for row in gather(CODE_ROOT, CODE_ROOT, plan_of()).files()}
    assert {"code/controller/boxside/importer.py", "code/trainer/supervise.py"} <= names
    assert "code/configs/recipes/coding_v1.yaml" in names
    assert not any("test" in Path(name).parts[1] or name.endswith(".pyc") for name in names)


def test_the_agent_fits_into_one_request_and_is_always_the_same():
    bundle = agent_bundle()
    assert len(bundle) <= MAX_BUNDLE_BYTES
    sources = json.loads(zlib.decompress(bundle))
    assert {"controller.boxside.importer", *AGENT_MODULES} - ONLY_STEPS <= set(sources)
    assert not ONLY_STEPS & set(sources)
    agent_bundle.cache_clear()
    assert agent_bundle() == bundle
