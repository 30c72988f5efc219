"""Whatever goes in comes out or is counted: whole builds on trees of any text, and bytes of any kind."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_builder.build import build
from corpus_builder.dialog import read_dialog
from corpus_builder.errors import ProjectError
from corpus_builder.plan import DialogSource, Plan, SoulQuestions, SoulSource, Speakers, ToolSource
from corpus_builder.request import Request
from corpus_builder.sample import parse_sample
from corpus_builder.soul import read_document
from corpus_builder.text import decode
from corpus_builder.tool import read_tool

SPEAKERS = Speakers(user=("冰朔",), assistant=("铸渊",))
SOUL = SoulSource(
    kind="soul",
    globs=("*.md",),
    questions=SoulQuestions(whole=("{path}?", "{path}!"), section=("{section}?", "{section} of {path}")),
    min_section_chars=20,
)
DIALOG, TOOL = DialogSource(kind="dialog"), ToolSource(kind="tool", path="tool.jsonl")

words = st.sampled_from(
    ["灯塔", "the lamp ", "夜", "。", ", ", "🌊", "e\u0301", "\u2028", "<|im_end|>", "1234567890 ", "\t"]
)
line = st.lists(words, min_size=1, max_size=12).map("".join).filter(lambda text: text.strip() and text[0] not in "\t,")
code = st.lists(line | st.just("冰朔：不是"), max_size=4).map(lambda lines: "\n".join(["```", *lines, "```"]))
paragraphs = st.lists(st.lists(line, min_size=1, max_size=4).map("\n".join) | code, min_size=1, max_size=6)
said = paragraphs.map("\n\n".join).map(str.strip).filter(bool)
dialogs = st.lists(st.tuples(said, said), min_size=1, max_size=6)
documents = st.lists(
    st.sampled_from(["# ", "## ", "##", "### "]).flatmap(lambda mark: line.map(mark.__add__)) | said
).map("\n".join)


def request_for(folder: Path, model_dir: Path, max_seq_len: int, *, off: bool) -> Request:
    """Return a request for `folder`; `off` leaves texts as they are (no redaction)."""
    checks = dict.fromkeys(("private_key", "access_key", "token", "url_password"), "off") if off else {}
    plan = Plan.model_validate(
        {
            "name": "p",
            "soul_replica": 2,
            "speakers": SPEAKERS.model_dump(),
            "checks": checks,
            "sources": [source.model_dump() for source in (SOUL, DIALOG, TOOL)],
        }
    )
    return Request(
        plan=plan, sources_dir=folder / "docs", dialog_dir=folder / "dialogs", base_model_dir=model_dir,
        max_seq_len=max_seq_len, samples=folder / "out/s", manifest=folder / "out/m", report=folder / "out/r",
        suite=None, lang="en",
    )  # fmt: skip


def write_tree(folder: Path, files: dict[str, bytes]) -> None:
    for place in ("docs", "dialogs", "out"):
        (folder / place).mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def said_in(samples, source):
    """Return the trained texts of one source, in order, joined."""
    chosen = [sample for sample in samples if sample.source == source]
    return [turn.content for sample in chosen for turn in sample.messages if turn.is_trained]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(talks=st.lists(dialogs, max_size=3), texts=st.lists(documents, max_size=2), max_seq_len=st.integers(90, 300))
def test_built_and_put_together_again_no_character_is_lost(chatml_model_dir, capsys, talks, texts, max_seq_len):
    files = {f"docs/{at}.md": text.encode() for at, text in enumerate(texts)}
    for at, talk in enumerate(talks):
        files[f"dialogs/{at}.md"] = "\n\n".join(f"冰朔：{asked}\n\n铸渊：{told}" for asked, told in talk).encode()
    with tempfile.TemporaryDirectory() as scratch:
        write_tree(Path(scratch), files)
        manifest = build(request_for(Path(scratch), chatml_model_dir, max_seq_len, off=True))
        samples = [parse_sample(row) for row in (Path(scratch) / "out/s").read_text("utf-8").split("\n") if row]
    assert {account.lost_tokens for account in manifest.classes.values()} <= {0}
    notes = {account.path: account.notes for account in manifest.files if account.sample_class == "relation"}
    for at, talk in enumerate(talks):
        assert "".join(said_in(samples, f"dialog:{at}.md")) == "".join(told for _, told in talk)
        shown = {turn.content for sample in samples for turn in sample.messages if turn.role == "user"}
        missing = sum(least_missing(asked, shown) for asked, _ in talk)
        assert missing <= notes[f"{at}.md"].get("left_out_characters", 0)
    for at, text in enumerate(texts):
        whole = text.strip("\n").rstrip()
        assert "".join(said_in(samples, f"soul:{at}.md")) == whole * 2  # its replicas follow each other


def least_missing(asked: str, shown: set[str]) -> int:
    """Return how many characters of a question no sample shows: it may be whole, numbered, or shortened to its end."""
    if asked in shown or any(text.startswith(f"{asked} (1/") for text in shown):
        return 0
    ends = (text.rpartition(" (")[0] if text.endswith(")") else text for text in shown)
    return len(asked) - max((len(end) for end in (*ends, *shown) if end and asked.endswith(end)), default=0)


encoded = st.builds(
    lambda text, encoding, at, byte: bytes([*(data := text.encode(encoding, "replace"))[:at], byte, *data[at:]]),
    st.lists(
        st.sampled_from(["冰朔：", "铸渊：", "\n", "```", "## a\n", '{"prompt": "', '", "response": "b"}', "灯"])
    ).map("".join),
    st.sampled_from(["utf-8", "utf-16", "gb18030", "big5", "shift-jis"]),
    st.integers(0, 40),
    st.integers(0, 255),
)
any_bytes = st.binary(max_size=300) | encoded


@settings(max_examples=300, deadline=None)
@given(any_bytes)
def test_bytes_of_any_kind_are_read_or_refused_by_name(data):
    try:
        text = decode(data).text
    except ProjectError:
        return
    readings = (
        read_dialog(text, "a.md", DIALOG, SPEAKERS),
        read_document(text, "a.md", SOUL, replicas=2),
        read_tool(text, "a.jsonl", TOOL),
    )
    for reading in readings:
        assert reading.units_read == reading.units_kept + sum(reading.drops.values())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(any_bytes, min_size=3, max_size=3), st.integers(40, 120))
def test_tree_of_any_bytes_is_built(chatml_model_dir, capsys, contents, max_seq_len):
    names = ("docs/a.md", "dialogs/b.txt", "docs/tool.jsonl")
    with tempfile.TemporaryDirectory() as scratch:
        write_tree(Path(scratch), dict(zip(names, contents, strict=True)))
        try:
            manifest = build(request_for(Path(scratch), chatml_model_dir, max_seq_len, off=False))
        except ProjectError:  # the window is too small for what is in it
            return
    assert len(manifest.files) == 3
    for account in manifest.files:
        assert account.units_read == account.units_kept + sum(account.drops.values())


def test_project_error_is_what_a_missing_tokenizer_raises(tmp_path):
    write_tree(tmp_path, {})
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_bytes(b"\xff{")
    with pytest.raises(ProjectError, match="tokenizer_missing"):
        build(request_for(tmp_path, tmp_path / "model", 90, off=False))
