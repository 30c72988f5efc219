"""Who says what in a Markdown dialog."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.dialog import parse_dialog_md, read_dialog
from corpus_builder.plan import DialogSource, Speakers
from corpus_builder.sample import Origin

SIZE = 250_000  # of a hostile text; in quadratic time each would take minutes
SPEAKERS = Speakers(user=("冰朔", "妈妈"), assistant=("铸渊", "GitHub Copilot", "Copilot", "copilot"))


def turns(text):
    return [(turn.role, turn.content) for turn in parse_dialog_md(text, SPEAKERS).turns]


def read(text):
    return read_dialog(text, "a.md", DialogSource(kind="dialog"), SPEAKERS)


SHAPES = [
    "{}：{}", "{}:{}", "{} ： {}", "  {}：{}", "**{}**：{}", "**{}：**{}", "**{}:** {}", "## {}：{}",
    "> {}：{}", "- {}: {}", "* {}：{}", "1. {}：{}", "{} 2026-05-03 10:22：{}", "{} (10:22): {}",
    "[2026-05-03 10:22] {}：{}", "10:22:33 {}：{}", "2026年5月3日 {}：{}", "{}(TCS-0002∞)：{}", "{}（甲）：{}",
    "[{}]：{}", "【{}】：{}", "**[{}]**：{}", "### {} (ICE-GL) 10:22：{}", "## {}\n\n{}", "**{}**\n{}",
    "[{}]\n{}", "{}\n{}", "{}：\n{}", "{} 2026-05-03 10:22:33\n{}", "2026/05/03 10:22 {}\n{}", "__{}__: {}",
    "`{}`: {}", "• {}：{}", "> **{}**：{}", "{} · 10:22：{}", "{} - 2026-05-03：{}", "**{}** _10:22_：{}",
    "**{}** (10:22)\n{}", "[10:22, 2026/5/3] {}: {}", "{} 2026-05-03 周日 10:22：{}", "{} 2026-05-03T10:22:33Z: {}",
    "2026-05-03 10:22:33 - {}(12345)\n{}", "{} [2026-05-03 10:22:33+08:00]：{}", "\xa0{}：{}", "{}﹕{}",
    "🧑 {}：{}", "**🧑\u200d💻 {}**：{}", "### ✨ {}\n{}", "#### **{}**：{}", "1) {}：{}", "<{}>：{}", "「{}」：{}",
    "{}（2026年5月3日 上午10:22）：{}", "{} 10:22 PM: {}", "***{}***：{}", "> ### {}：{}", "> > {}：{}",
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_of_a_speakers_line(shape):
    text = "\n\n".join([shape.format("冰朔", "在吗?"), shape.format("铸渊", "在。"), shape.format("妈妈", "早")])
    assert turns(text) == [("user", "在吗?"), ("assistant", "在。"), ("user", "早")]


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_beside_a_plain_line(shape):
    assert turns(f"{shape.format('冰朔', '在吗?')}\n铸渊：在。") == [("user", "在吗?"), ("assistant", "在。")]


@pytest.mark.parametrize(
    "line",
    [
        "冰朔说：早",
        "看 https://冰朔.example",
        "copilot://settings",
        "ICE-GL-ZY001：早",
        "妈妈，早：好",
        "冰朔 10:22:33 早",
        "小冰朔：早",
    ],
)
def test_line_that_is_no_speakers_line_is_text(line):
    assert turns(f"冰朔：问\n铸渊：答\n{line}") == [("user", "问"), ("assistant", f"答\n{line}")]


def test_longest_name_wins_and_an_id_never_decides():
    speakers = Speakers(user=("ICE-GL", "Git"), assistant=("铸渊", "GitHub Copilot"))
    dialog = parse_dialog_md("Git：a\nGitHub Copilot：b\n铸渊(ICE-GL-ZY001)：c\nICE-GL：d", speakers)
    assert [turn.role for turn in dialog.turns] == ["user", "assistant", "user"]


@pytest.mark.parametrize("fence", ["```", "~~~", "````", "``` yaml"])
def test_speakers_line_inside_a_fence_is_text(fence):
    close = fence.split()[0]
    answer = f"看:\n{fence}\ncopilot: enabled\n冰朔：不是我\n{close}\n完"
    assert turns(f"冰朔：问\n铸渊：{answer}\n冰朔：谢谢") == [("user", "问"), ("assistant", answer), ("user", "谢谢")]


def test_fences_of_any_length_and_kind_nest():
    answer = "~~~~ md\n冰朔：不是我\n```\n冰朔：我\n~~~\n```\n~~~~\n- ```\n  铸渊：也不是\n  ```"
    assert turns(f"冰朔：问\n铸渊：{answer}\n冰朔：好") == [("user", "问"), ("assistant", answer), ("user", "好")]


def test_fence_that_opens_on_the_speakers_line_or_never_closes():
    assert turns("冰朔：问\n铸渊：```\ncopilot: x\n```\n冰朔：好")[1] == ("assistant", "```\ncopilot: x\n```")
    assert turns("冰朔：```\n铸渊：答") == [("user", "```"), ("assistant", "答")]


def test_turns_in_a_row_are_merged_and_counted():
    reading = read("冰朔：一\n妈妈：二\n铸渊：三\n铸渊：四")
    assert [m.content for m in reading.samples[0].messages] == ["一\n二", "三\n四"]
    assert (reading.units_read, reading.units_kept, reading.notes["merged_turns"]) == (4, 4, 2)


def test_what_is_no_turn_is_counted():
    reading = read(
        "---\ntitle: x\n冰朔：front matter\n---\n# 题\n冰朔：\n铸渊：答\n\n---\n\n冰朔：问\n铸渊：好\n妈妈：再见"
    )
    assert [m.content for m in reading.samples[0].messages] == ["答", "问", "好"]
    assert reading.drops == {"before_first_turn": 1, "empty_turn": 1, "no_answer": 1}
    assert (reading.units_read, reading.units_kept) == (6, 3)
    assert reading.notes == {"rules_left_out": 1, "starts_with_assistant": 1}


@pytest.mark.parametrize(
    ("text", "drops"),
    [
        ("", {"empty_file": 1}),
        (" \n", {"empty_file": 1}),
        ("a note", {"no_turns": 1}),
        ("铸渊：独白", {"no_question": 1}),
        ("冰朔：在吗\n妈妈：在吗", {"no_answer": 2}),
        ("冰朔：", {"empty_turn": 1}),
    ],
)
def test_file_that_gives_no_sample_says_why(text, drops):
    reading = read(text)
    assert (reading.samples, reading.drops) == ((), drops)
    assert reading.units_read == sum(drops.values())


def test_name_alone_is_text_where_colons_give_both_sides():
    text = "冰朔：问\n铸渊：他们是\n## 冰朔\n光湖\n\n妈妈\n铸渊：好"
    assert turns(text) == [("user", "问"), ("assistant", "他们是\n## 冰朔\n光湖\n\n妈妈\n好")]
    assert parse_dialog_md(text, SPEAKERS).names_as_text == 2


def test_unknown_speakers_are_named_from_the_second_time_on():
    text = "冰朔：问\n霜砚：我\n铸渊：答\n霜砚：也\n注意：一次"
    assert parse_dialog_md(text, SPEAKERS).unknown_speakers == ("霜砚",)


def test_dialog_may_begin_with_the_assistant_and_end_on_the_user():
    reading = read("铸渊：早\n冰朔：问\n铸渊：答\n冰朔：再见")
    assert [m.role for m in reading.samples[0].messages] == ["assistant", "user", "assistant"]
    assert (reading.notes["starts_with_assistant"], reading.drops) == (1, {"no_answer": 1})


def test_front_matter_and_headings_between_turns_are_no_speech():
    text = "---\ntags: a\ntags: b\n---\n# 题\n\n冰朔：问\n\n## 第二天\n\n---\n\n铸渊：答\n\n# 完\n"
    dialog = parse_dialog_md(text, SPEAKERS)
    assert [turn.content for turn in dialog.turns] == ["问", "答"]
    assert (dialog.has_text_before, dialog.headings_left_out, dialog.rules_left_out) == (True, 2, 1)
    assert dialog.unknown_speakers == ()


def test_heading_that_is_all_or_part_of_what_is_said_stays():
    assert turns("冰朔：\n\n# 改这一句\n\n铸渊：\n\n# 一\n二\n# 三") == [
        ("user", "# 改这一句"),
        ("assistant", "# 一\n二\n# 三"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        " " * SIZE + "x", "10:22" + " " * SIZE + "冰朔 x", "冰朔" + " " * SIZE + "x", "*" * SIZE, "> " * SIZE,
        "```\n" * SIZE, "冰朔：```\n" * SIZE, "` " * SIZE, "铸渊：a\n" + "\n\n# b" * SIZE, "---\n" + "--- \n" * SIZE,
        "冰朔" + "*" * SIZE, "冰朔(" + "(" * SIZE, "\n" * SIZE, "冰朔：a\n" * SIZE,
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_hostile_text_of_a_megabyte_ends(text):
    dialog = parse_dialog_md(text, SPEAKERS)
    assert len(dialog.turns) <= 2


def test_emphasis_that_spans_what_is_said_is_kept():
    assert turns("**冰朔：早**\n**铸渊：早** 啊") == [("user", "**早**"), ("assistant", "**早** 啊")]


def test_quoted_turn_loses_its_quote_marks_and_keeps_its_lines():
    assert turns("> 冰朔：一\n> 二\n>\n> 三\n\n铸渊：> 引") == [("user", "一\n二\n\n三"), ("assistant", "> 引")]


def test_first_line_of_code_keeps_its_indentation():
    assert turns("冰朔：问\n铸渊：\n    code\n  more")[1] == ("assistant", "    code\n  more")


def test_places_are_lines_of_the_file():
    text = "# t\n\n冰朔：一\n二\n\n铸渊：三\n\n"
    dialog = parse_dialog_md(text, SPEAKERS)
    assert [text[turn.start : turn.end] for turn in dialog.turns] == ["冰朔：一\n二", "铸渊：三"]
    assert dialog.rounds == 1
    assert read(text).samples[0].origin == Origin("a.md", 3, 6)


lines = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp", "Zs")), min_size=1, max_size=20).filter(
    lambda line: (
        not any(name in line for name in (*SPEAKERS.user, *SPEAKERS.assistant))
        and not line.startswith(("`", "~", "-", "*", "_", ">"))
    )
)
said = st.lists(lines, min_size=1, max_size=4).map("\n".join)


@given(st.lists(st.tuples(said, said), min_size=1, max_size=5), st.sampled_from(["{}：{}", "**{}**: {}", "## {}\n{}"]))
def test_assembled_dialog_comes_back_turn_by_turn(rounds, shape):
    wanted = [turn for asked, answered in rounds for turn in (("user", asked), ("assistant", answered))]
    names = {"user": "冰朔", "assistant": "铸渊"}
    assert turns("\n\n".join(shape.format(names[role], content) for role, content in wanted)) == wanted


@given(st.text(st.sampled_from("冰朔铸渊：:`~*>#- \n[]()1a"), max_size=120))
def test_any_text_adds_up(text):
    reading = read(text)
    assert reading.units_read == reading.units_kept + sum(reading.drops.values())
    assert all(m.content for sample in reading.samples for m in sample.messages)
