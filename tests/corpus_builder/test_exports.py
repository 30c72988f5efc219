"""Exports of other services: every turn is in a sample or counted, whatever the file holds."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_builder.exports import Export
from corpus_builder.plan import ChatSource, ExportSource, JsonDialogSource, Speakers
from corpus_builder.reading import Reading

SPEAKERS = Speakers(user=("冰朔",), assistant=("铸渊",))
SHARED_DATA = Path(__file__).parents[3] / "shared/data"
LOCOMO = JsonDialogSource(
    kind="json-dialog",
    files=("locomo/locomo10.json",),
    turns="conversation.session_#[]",
    user_field="conversation.speaker_a",
    assistant_field="conversation.speaker_b",
)


def source_of(kind, **more):
    model = {"sharegpt": ChatSource, "messages": ChatSource, "json-dialog": JsonDialogSource}.get(kind, ExportSource)
    return model(kind=kind, files=("x",), **more)


def read_export(path, source):
    """Return a whole export, as a reading of its parts."""
    export = Export(path, path.name, source, SPEAKERS)
    stream = export.reading
    samples = tuple(stream.samples)
    assert stream.units_read == stream.units_kept + sum(stream.drops.values())
    export.close()
    return Reading(
        samples=samples, units_read=stream.units_read, units_kept=stream.units_kept, drops=dict(stream.drops),
        notes=dict(stream.notes), rounds=stream.rounds, unknown_speakers=stream.unknown_speakers,
    )  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(kind, data, **more):
        path = tmp_path / "x.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data, ensure_ascii=False), "utf-8")
        return read_export(path, source_of(kind, **more))

    return read


def turns(sample):
    return [(message.role, message.content) for message in sample.messages]


def gpt(key, parent, role, text="", **more):
    """Return one node of ChatGPT's `mapping`."""
    content = more.pop("content", {"content_type": "text", "parts": [text]})
    message = {"author": {"role": role}, "content": content, "status": "finished_successfully", **more}
    return {key: {"id": key, "message": message, "parent": parent}}


def test_chatgpt_branches_and_what_is_left_out(read):
    mapping = {
        "root": {"id": "root", "message": None, "parent": None, "children": ["sys"]},
        **gpt("sys", "root", "system", metadata={"is_visually_hidden_from_conversation": True}),
        **gpt("me", "sys", "user", content={"content_type": "user_editable_context", "user_profile": "private"}),
        **gpt("u1", "me", "user", "画一只海鸥"),
        **gpt("call", "u1", "assistant", content={"content_type": "code", "text": "{}"}, recipient="dalle.text2im"),
        **gpt("pic", "call", "tool", content={"content_type": "multimodal_text", "parts": [{"asset_pointer": "f"}]}),
        **gpt("a1", "pic", "assistant", "画好了。\ue200cite\ue202turn0\ue201"),
        **gpt("u2", "a1", "user", content={"content_type": "multimodal_text", "parts": [{"asset": 1}, "再大一点"]}),
        **gpt("think", "u2", "assistant", content={"content_type": "thoughts", "thoughts": []}),
        **gpt("a2", "think", "assistant", "好。"),
        **gpt("u3", "a2", "user", content={"content_type": "multimodal_text", "parts": [{"asset": 1}]}),
        **gpt("a3", "u3", "assistant", "半句", status="in_progress"),
        **gpt("b2", "u2", "assistant", "重新生成的回答。", metadata={"finish_details": {"type": "stop"}}),
        **gpt("c2", "u2", "assistant", "停", metadata={"finish_details": {"type": "interrupted"}}),
        **gpt("none", "u2", "assistant", ""),
        "odd": 7,
    }
    reading = read("chatgpt", [{"title": "t", "mapping": mapping, "current_node": "a2"}, {"title": "no mapping"}])
    assert [turns(sample) for sample in reading.samples] == [
        [("user", "画一只海鸥"), ("assistant", "画好了。"), ("user", "再大一点"), ("assistant", "好。")],
        [("user", "画一只海鸥"), ("assistant", "画好了。"), ("user", "再大一点"), ("assistant", "重新生成的回答。")],
    ]
    assert [message.train for message in reading.samples[1].messages] == [True, False, True, True]
    assert {sample.source for sample in reading.samples} == {"chatgpt:x.json#1"}
    assert reading.drops == {
        "hidden": 2, "tool_call": 1, "tool_result": 1, "thoughts": 1, "image": 1, "interrupted": 2, "empty_turn": 1,
        "bad_message": 1, "other_format": 1,
    }  # fmt: skip
    assert reading.notes == {"branches": 1, "dialogs": 1, "parts_left_out": 2}


def test_chatgpt_answer_cut_by_the_limit_goes_on_in_the_next_one(read):
    cut = {"metadata": {"finish_details": {"type": "max_tokens"}}, "status": "finished_partial_completion"}
    mapping = {**gpt("u", None, "user", "q"), **gpt("a", "u", "assistant", "1", **cut)}
    assert read("chatgpt", [{"mapping": mapping}]).drops == {"interrupted": 1, "no_answer": 1}
    mapping |= gpt("b", "a", "assistant", "2")
    assert turns(read("chatgpt", [{"mapping": mapping}]).samples[0]) == [("user", "q"), ("assistant", "1\n2")]


def test_claude_tree_and_older_lists(read):
    nobody = "00000000-0000-4000-8000-000000000000"
    messages = [
        {"uuid": "u1", "sender": "human", "text": "问", "parent_message_uuid": nobody,
         "attachments": [{"extracted_content": "附上的文字"}, {"file_name": "x"}]},
        {"uuid": "a1", "sender": "assistant", "parent_message_uuid": "u1",
         "content": [{"type": "thinking", "thinking": "…"}, {"type": "text", "text": "答"}]},
        {"uuid": "b1", "sender": "assistant", "parent_message_uuid": "u1", "text": "另一个答"},
        {"uuid": "a2", "sender": "assistant", "parent_message_uuid": "a1", "content": [{"type": "tool_use"}]},
        {"uuid": "a3", "sender": "assistant", "parent_message_uuid": "a1", "text": "…", "stop_reason": "max_tokens"},
        {"uuid": "s", "sender": "system", "text": "?"},
    ]  # fmt: skip
    reading = read("claude", [{"uuid": "c", "chat_messages": messages}])
    assert [turns(sample) for sample in reading.samples] == [
        [("user", "问\n\n附上的文字"), ("assistant", "另一个答")],
        [("user", "问\n\n附上的文字"), ("assistant", "答")],
    ]
    assert reading.drops == {"tool_call": 1, "interrupted": 1, "bad_message": 1}
    older = [{"sender": "human", "text": "q"}, {"sender": "assistant", "text": "a"}]
    assert turns(read("claude", [{"chat_messages": older}]).samples[0]) == [("user", "q"), ("assistant", "a")]


def test_copilot_chat(read):
    fence = [{"value": "改好了：\n```\n"}, {"kind": "codeblockUri"}, {"kind": "textEditGroup"}, {"value": "\n```\n见 "}]
    reference = {"kind": "inlineReference", "inlineReference": {"path": "/home/me/灯塔.py"}}
    requests = [
        {"message": {"text": "修一下"}, "response": [*fence, reference, {"value": "。"}]},
        {"message": "再来", "response": [{"kind": "markdownContent", "content": {"value": "半"}}], "isCanceled": True},
        {"message": {"text": "又来"}, "response": [], "result": {"errorDetails": {"message": "no"}}},
        {"message": {"text": "最后"}, "response": [{"kind": "toolInvocationSerialized"}]},
        {"message": {"text": "好吗"}, "response": [{"value": "好"}]},
        None,
    ]
    chat = {"responderUsername": "GitHub Copilot", "requests": requests}
    reading = read("copilot", chat)
    assert turns(reading.samples[0]) == [
        ("user", "修一下"), ("assistant", "改好了：\n见 `灯塔.py`。"), ("user", "再来\n又来\n最后\n好吗"),
        ("assistant", "好"),
    ]  # fmt: skip
    assert reading.drops == {"interrupted": 1, "failed_answer": 1, "tool_call": 1, "bad_message": 1}
    assert len(read("copilot", [chat, chat]).samples) == 2
    assert read("copilot", {"version": 3}).drops == {"empty_dialog": 1}


def test_openai_messages_with_parts_tool_calls_and_null_contents(read):
    row = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "看图"}, {"type": "image_url", "image_url": {}}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "15 °C", "tool_call_id": "1"},
            {"role": "assistant", "content": "十五度。", "weight": 0},
            {"role": "user", "content": "谢谢"},
            {"role": "assistant", "content": "不客气。"},
            {"role": "system", "content": "later"},
            {"role": "narrator", "content": "?"},
        ]
    }
    reading = read("messages", json.dumps(row) + '\n{"messages": []}\n{"text": "x"}\n{bad\n')
    assert turns(reading.samples[0]) == [
        ("system", "Be brief."), ("user", "看图"), ("assistant", "十五度。"), ("user", "谢谢"),
        ("assistant", "不客气。"),
    ]  # fmt: skip
    assert [message.train for message in reading.samples[0].messages] == [True, True, False, True, True]
    assert reading.samples[0].sample_class == "data"
    assert reading.drops == {
        "tool_call": 1, "tool_result": 1, "system": 1, "bad_message": 1, "empty_dialog": 1, "other_format": 1,
        "bad_json": 1,
    }  # fmt: skip


@pytest.mark.parametrize("is_list", [True, False])
def test_sharegpt_as_a_list_and_as_lines(read, is_list):
    rows = [
        {"conversations": [{"from": "human", "value": "你好\u2028"}, {"from": "gpt", "value": "在。"}], "system": "s"},
        {"conversations": [{"from": "gpt", "value": "alone"}]},
        {"conversations": [{"role": "user", "content": "q"}, {"from": "observation", "value": "o"}]},
    ]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    reading = read("sharegpt", rows if is_list else lines)
    assert [turns(sample) for sample in reading.samples] == [
        [("system", "s"), ("user", "你好\u2028"), ("assistant", "在。")]
    ]
    assert reading.samples[0].origin.start_line == 1
    assert reading.drops == {"no_question": 1, "no_answer": 1, "tool_result": 1}


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        ([{"turns": [{"speaker": "human", "text": "q"}, {"speaker": "bot", "text": "a"}]}], {}),
        ({"turns": [{"speaker": "冰朔", "text": "q"}, {"speaker": "铸渊", "text": "a"}]}, {"dialogs": ""}),
        ({"all": {"d1": [{"s": {"n": "human"}, "text": "q"}, {"s": {"n": "bot"}, "text": "a"}]}},
         {"dialogs": "all.*", "turns": "[]", "speaker": "s.n"}),
        ({"all": [{"me": "A", "it": "B", "s_10": [{"speaker": "B", "text": "a"}],
                   "s_2": [{"speaker": "A", "text": "q"}]}]},
         {"dialogs": "all[]", "turns": "s_#[]", "user_field": "me", "assistant_field": "it"}),
    ],
)  # fmt: skip
def test_json_of_any_shape_by_field_paths(read, data, paths):
    reading = read("json-dialog", data, **paths)
    assert [turns(sample) for sample in reading.samples] == [[("user", "q"), ("assistant", "a")]]
    assert reading.drops == {}


def test_unknown_speaker_and_paths_that_lead_nowhere_are_counted(read):
    turn = [{"speaker": "霜砚", "text": "?"}, {"speaker": "human"}, {"speaker": "human", "text": "q"}]
    reading = read("json-dialog", [{"turns": turn}, {"other": 1}])
    assert reading.drops == {"unknown_speaker": 1, "bad_message": 1, "no_answer": 1, "empty_dialog": 1}
    assert reading.unknown_speakers == ("霜砚",)
    assert read("json-dialog", [{"turns": turn}], dialogs="nowhere[]").drops == {"no_dialogs": 1}


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="LoCoMo's data lies beside the checkout, and is not here")
def test_every_turn_of_locomo_is_accounted_for():
    reading = read_export(SHARED_DATA / LOCOMO.files[0], LOCOMO)
    assert len(reading.samples) == 10
    assert (reading.units_read, reading.units_kept, reading.drops) == (5882, 5875, {"no_answer": 7})
    assert sum(len(sample.messages) for sample in reading.samples) == 5875 - reading.notes["merged_turns"]


@pytest.mark.parametrize("kind", ["chatgpt", "claude", "copilot", "messages", "sharegpt", "json-dialog"])
@pytest.mark.parametrize("content", ["", "[]", "{", "[{", "null", "[[1], 2, {}]", "\0\0[", "\udcff[1]"])
def test_file_of_another_kind_is_counted(tmp_path, kind, content):
    (tmp_path / "x.json").write_text(content, "utf-8", errors="surrogateescape")
    reading = read_export(tmp_path / "x.json", source_of(kind))
    assert reading.samples == ()
    assert reading.units_read >= 1


KEYS = (
    "mapping", "message", "author", "role", "content", "parts", "parent", "user", "assistant", "metadata", "status",
    "chat_messages", "sender", "human", "uuid", "requests", "response", "value", "kind", "messages", "conversations",
    "from", "gpt", "turns", "speaker", "text", "content_type", "finish_details", "type", "u", "a", "inlineReference",
    "parent_message_uuid", "attachments", "current_node", "weight", "system", "tool_calls",
)  # fmt: skip
WORD = st.sampled_from(KEYS)
ANYTHING = st.recursive(
    WORD | st.none() | st.integers(-1, 1) | st.booleans() | st.text("a\ud800\n", max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORD, inner, max_size=5),
    max_leaves=30,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.sampled_from(["chatgpt", "claude", "copilot", "messages", "sharegpt", "json-dialog"]), st.lists(ANYTHING))
def test_any_json_is_accounted_for(tmp_path, kind, value):
    (tmp_path / "x.json").write_text(json.dumps(value), "utf-8")
    reading = read_export(tmp_path / "x.json", source_of(kind))
    for sample in reading.samples:
        assert any(message.is_trained for message in sample.messages)
        json.dumps([message.content for message in sample.messages], ensure_ascii=False).encode("utf-8")
