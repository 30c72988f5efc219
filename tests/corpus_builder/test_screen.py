"""What goes from the samples, and what is only reported: counted, with its line, never with its value."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.build import build, main
from corpus_builder.plan import Checks
from corpus_builder.request import load_request
from corpus_builder.sample import Message, Origin, Sample
from corpus_builder.screen import MAX_LINES, Screen, redact_text
from corpus_builder.sensitive import find_sensitive
from tests.corpus_builder.small_world import read_samples

KEY = "AKID" + "z8krbsJ5yKBZQpn74WFkmLPx3gnPhESA"
PHONE = "13912345678"
PIECES = [KEY, PHONE, "a@b.org", "postgres://u:secret9@h/", "你好", " ", "\n", "text ", "灯。"]


def draft(*contents, line=1):
    messages = tuple(Message("assistant" if at % 2 else "user", content) for at, content in enumerate(contents))
    return Sample(messages=messages, source="dialog:a.md", sample_class="relation", origin=Origin("a.md", line, line))


def test_redacted_value_goes_everywhere_and_its_lines_are_told():
    text = f"冰朔：{KEY}\n铸渊：记下了\n{KEY}"
    screen = Screen({"access_key": "redact"}, text)
    clean = screen.clean(draft(KEY, f"记下了\n{KEY}"))
    assert [turn.content for turn in clean.messages] == ["[REDACTED:access_key]", "记下了\n[REDACTED:access_key]"]
    receipt = screen.receipts()["access_key"]
    assert (receipt.count, receipt.lines) == (2, [1, 3])


def test_reported_value_stays():
    screen = Screen({"phone": "report", "email": "off"}, f"{PHONE} a@b.org")
    said = draft(f"{PHONE} a@b.org", "ok")
    assert screen.clean(said) == said
    assert list(screen.receipts()) == ["phone"]


def test_replicas_and_sections_count_a_place_once():
    screen = Screen({"phone": "report"}, f"# T\n\n{PHONE}\n")
    for _ in range(5):
        screen.clean(draft("?", f"{PHONE}", line=3))
    assert screen.receipts()["phone"].count == 1


def test_value_spelled_otherwise_in_the_file_has_its_units_line():
    screen = Screen({"private_key": "redact"}, '{"prompt": "…"}')
    screen.clean(draft("-----BEGIN PRIVATE KEY-----\nabcdefghijklmnop\n-----END PRIVATE KEY-----", "ok", line=7))
    assert screen.receipts()["private_key"].lines == [7]


def test_many_places_are_counted_and_some_are_named():
    text = "\n".join(f"{PHONE[:-2]}{at:02}" for at in range(90))
    screen = Screen({"phone": "report"}, text)
    screen.clean(draft(text, "ok"))
    receipt = screen.receipts()["phone"]
    assert (receipt.count, receipt.lines) == (90, list(range(1, MAX_LINES + 1)))


@given(st.lists(st.sampled_from(PIECES), max_size=30).map(" ".join))
def test_redaction_takes_the_findings_and_nothing_else(text):
    policies = {"access_key": "redact", "url_password": "redact", "phone": "report", "email": "report"}
    redacted = redact_text(text, policies)
    rebuilt, end = "", 0
    for span in find_sensitive(text):
        if policies[span.kind] == "redact":
            rebuilt += text[end : span.start] + f"[REDACTED:{span.kind}]"
            end = span.end
    assert redacted == rebuilt + text[end:]
    assert redact_text(redacted, policies) == redacted
    assert KEY not in redacted


@pytest.fixture
def leaky(world):
    """A world whose files hold a key and a number."""
    (world.dialogs / "leak.md").write_text(f"冰朔：我的号码 {PHONE}\n铸渊：SecretId 是 {KEY}，好\n", "utf-8")
    (world.sources / "docs/a.md").write_text(f"## One\n\nkeep\n\n## {KEY}\n\nhttps://u:secret9@h/x\n", "utf-8")
    line = json.dumps({"prompt": f"log in as {KEY}", "response": "no"})
    (world.sources / "tool.jsonl").write_text('{"prompt": "p", "response": "r"}\n' + line + "\n", "utf-8")
    return world


def test_secrets_are_in_no_file_and_no_line_that_is_written(leaky, capsys):
    assert main([str(leaky())]) == 0
    written = [path for path in leaky.out.rglob("*") if path.is_file()]
    assert len(written) > 5
    for path in written:
        assert KEY.encode() not in path.read_bytes(), path.name
        assert b"secret9" not in path.read_bytes(), path.name
    log = capsys.readouterr()
    assert KEY not in log.out + log.err
    assert PHONE not in log.out + (leaky.out / "manifest").read_text() + (leaky.out / "report").read_text()
    assert any(PHONE in turn.content for sample in read_samples(leaky) for turn in sample.messages)


def test_account_adds_up_with_redactions(leaky):
    manifest = build(load_request(leaky()))
    found = {(one.kind, one.path): (one.action, one.count, one.lines) for one in manifest.findings}
    assert found["access_key", "docs/a.md"] == ("redacted", 1, (5,))
    assert found["url_password", "docs/a.md"] == ("redacted", 1, (7,))
    assert found["access_key", "leak.md"] == ("redacted", 1, (2,))
    assert found["phone", "leak.md"] == ("reported", 1, (1,))
    assert found["access_key", "tool.jsonl"] == ("redacted", 1, (2,))
    notes = {account.path: account.notes for account in manifest.files}
    assert (notes["docs/a.md"]["redacted"], notes["leak.md"]["redacted"]) == (2, 1)
    assert all(account.lost_tokens == 0 for account in manifest.classes.values())


def test_policy_decides_by_kind(leaky):
    checks = {"access_key": "report", "url_password": "off", "phone": "redact"}
    manifest = build(load_request(leaky(plan={**leaky.plan, "checks": checks})))
    said = "".join(turn.content for sample in read_samples(leaky) for turn in sample.messages)
    assert KEY in said
    assert "secret9" in said
    assert PHONE not in said
    assert {one.kind: one.action for one in manifest.findings if one.kind in Checks().policies} == {
        "access_key": "reported",
        "phone": "redacted",
    }


def test_every_kind_has_a_policy_and_a_name_in_both_languages():
    from corpus_builder.say import LANGUAGES, say
    from corpus_builder.sensitive import PERSONAL, SECRETS

    policies = Checks().policies
    assert {kind: policies[kind] for kind in SECRETS} == dict.fromkeys(SECRETS, "redact")
    assert {kind: policies[kind] for kind in PERSONAL} == dict.fromkeys(PERSONAL, "report")
    assert set(policies) == {*SECRETS, *PERSONAL}
    for lang in LANGUAGES:
        for kind in (*policies, "equal_text", "near_copy", "contradiction"):
            assert say(f"finding.{kind}", lang)
