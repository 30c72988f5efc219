"""Models that don't speak ChatML: their own template's ids, labelled by construction, on a tokenizer of each kind."""

import hashlib
import json
import shutil
from itertools import chain

import pytest

from corpus_builder.build import build, find_unchanged
from corpus_builder.errors import ProjectError
from corpus_builder.frame import CHAT_TEMPLATE, IGNORE_INDEX, Frame, TemplateFrame, load_frame
from corpus_builder.mask import build_assistant_mask
from corpus_builder.part_tokens import PartTokens
from corpus_builder.request import load_request
from corpus_builder.sample import Message, Sample
from corpus_builder.split import Splitter
from corpus_builder.templates import NO_CLOCK, ChatTemplate, template_of
from corpus_builder.token_counts import TokenCounts
from tests.corpus_builder.small_world import make_world
from tests.corpus_builder.test_incremental import settle
from tests.tokenizers_real import (
    OTHER_FORMS,
    QWEN_TEMPLATE,
    other_tokenizer_json,
    write_other_folder,
    write_tokenizer_folder,
)

TEXTS = [
    "The keeper lights the lamp at dusk, and the lamp flashes. I keep the lamp, every night. Who are you? " * 4,
    "守灯人在黄昏点灯，海鸥陪着她。你是谁？晚安" * 4,
    "user assistant system model\n\nToday Date: 26 Jul 2024 def f(x): return x",
]
SYSTEM = Message("system", "You keep the light. 灯塔")
TALK = (
    Message("user", "你是谁？ Who are you?"),
    Message("assistant", "我是守灯人。\n\n1. I'll answer, 2026-01-01."),
    Message("user", "How many steps?  214, or 1,871?\n\tTwice: 灯塔 🐦"),
    Message("assistant", "def f(x):\n    return x  # 214"),
)
FORMS = pytest.mark.parametrize("name", sorted(OTHER_FORMS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model folder's tokenizer half for each form."""
    root = tmp_path_factory.mktemp("forms")
    return {
        name: write_other_folder(root / name, form, other_tokenizer_json(form, TEXTS))
        for name, form in OTHER_FORMS.items()
    }


@pytest.fixture(scope="module")
def frames(folders):
    return {name: load_frame(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def hugging_face(folders, frames):
    """transformers' tokenizer of each form, with the template that a trained model gets."""
    from transformers import AutoTokenizer

    found = {name: AutoTokenizer.from_pretrained(str(folder)) for name, folder in folders.items()}
    for name, tokenizer in found.items():
        tokenizer.chat_template = frames[name].chat_template
    return found


def as_chat(messages):
    return [{"role": message.role, "content": message.content} for message in messages]


def rendered_ids(tokenizer, messages, **kwargs):
    return list(
        tokenizer.apply_chat_template(as_chat(messages), tokenize=True, return_dict=True, **kwargs)["input_ids"]
    )


def conversations(name):
    """Ordinary conversations that a form's template takes."""
    yield from (TALK[:2], TALK)
    if "system" not in OTHER_FORMS[name].refuses:
        yield from ((SYSTEM, *TALK[:2]), (SYSTEM, *TALK))


def scanned(frame, ids):
    opening, *header = frame.answer_opening
    return build_assistant_mask(ids, im_start=opening, im_end=frame.stop, assistant_header=header)


@FORMS
def test_ids_are_those_of_the_models_own_template(name, frames, hugging_face):
    assert isinstance(frames[name], TemplateFrame)
    assert not frames[name].is_chatml
    for talk in conversations(name):
        assert frames[name].encode(talk).ids == rendered_ids(hugging_face[name], talk)


@FORMS
def test_prompts_are_those_of_the_models_own_template(name, frames, hugging_face):
    for talk in conversations(name):
        asked = frames[name].prompt(talk[:-1])
        assert asked == rendered_ids(hugging_face[name], talk[:-1], add_generation_prompt=True)
        assert frames[name].encode(talk).ids[: len(asked)] == asked  # what is asked is what was trained


@FORMS
def test_what_is_learned_is_each_answer_and_its_stop_token(name, frames, hugging_face):
    frame, tokenizer = frames[name], hugging_face[name]
    for talk in conversations(name):
        labels = [label for label in frame.encode(talk).labels if label != IGNORE_INDEX]
        stops = [at for at, label in enumerate(labels) if label == frame.stop]
        answers = [message.content for message in talk if message.role == "assistant"]
        starts = [0, *(at + 1 for at in stops)]
        said = [tokenizer.decode(labels[start:end]) for start, end in zip(starts, stops, strict=False)]
        assert [text.strip() for text in said] == answers
        assert starts[-1] == len(labels)


@FORMS
def test_a_scan_of_the_ids_finds_the_same_answers(name, frames):
    for talk in conversations(name):
        segments = frames[name].segments(talk)
        ids = list(chain.from_iterable(part.ids for part in segments))
        made = list(chain.from_iterable([part.is_answer] * len(part.ids) for part in segments))
        assert scanned(frames[name], ids) == made
        assert any(made)


@FORMS
def test_a_turn_that_is_context_is_not_learned(name, frames):
    frame = frames[name]
    talk = (TALK[0], Message("assistant", TALK[1].content, train=False), *TALK[2:])
    encoded, whole = frame.encode(talk), frame.encode(TALK)
    assert encoded.ids == whole.ids
    learned, last = ([label for label in one.labels if label != IGNORE_INDEX] for one in (encoded, whole))
    assert learned == last[-len(learned) :]
    assert learned.count(frame.stop) == 1


@FORMS
@pytest.mark.parametrize("at", [0, 1])
def test_a_control_token_written_in_a_text_is_text(name, at, frames, hugging_face):
    frame, form = frames[name], OTHER_FORMS[name]
    written = "".join(f"a{control}b " for control in (*form.controls, form.eos)) + form.eos
    talk = [Message(turn.role, written if place == at else "lamp") for place, turn in enumerate(TALK[:2])]
    plain = frame.encode([Message(turn.role, "lamp") for turn in talk])
    encoded = frame.encode(talk)
    controls = set(frame.controls.values())
    assert [token for token in encoded.ids if token in controls] == [token for token in plain.ids if token in controls]
    shown = hugging_face[name].decode(encoded.ids, skip_special_tokens=False)
    assert written.replace(" ", "") in shown.replace(" ", "")


@FORMS
@pytest.mark.parametrize("content", ["\n\nlamp", "  lamp", "lamp\n\n", "\n"])
def test_outer_white_space_never_changes_the_frame(name, content, frames):
    frame = frames[name]
    layout = [part.ids for part in frame.segments([TALK[0], Message("assistant", "x")])]
    talk = [Message("user", content), Message("assistant", content)]
    parts = [part.ids for part in frame.segments(talk)]
    assert parts[::2] == layout[::2]  # what stands before, between and after
    ids = list(chain.from_iterable(parts))
    assert sum(scanned(frame, ids)) == len(parts[3])


def test_white_space_is_trimmed_where_the_template_trims(frames, hugging_face):
    talk = [Message("user", "\n lamp \n"), Message("assistant", " light\n")]
    assert frames["llama3"].encode(talk).ids == rendered_ids(hugging_face["llama3"], talk)
    trained = [part.ids for part in frames["phi4"].segments(talk) if part.is_trained]
    assert list(trained[0]) == [*frames["phi4"].encode_text(" light\n"), frames["phi4"].stop]


@FORMS
def test_the_beginning_is_never_said_twice(name, frames):
    form, frame = OTHER_FORMS[name], frames[name]
    is_said = "bos_token" in form.template
    rounds = 2 if name == "llama2" else 1  # its template says it before every question
    assert frame.encode(TALK).ids.count(frame.controls[form.bos]) == (rounds if is_said else 0)


@FORMS
def test_contents_are_all_that_is_encoded(name, frames):
    frame = frames[name]
    for talk in conversations(name):
        known = dict(zip(frame.contents(talk), frame.encode_texts(frame.contents(talk)), strict=True))
        assert frame.encode(talk, known.__getitem__) == frame.encode(talk)


@FORMS
def test_a_trained_folder_renders_the_same_frame(name, folders, frames, tmp_path):
    from trainer.final import check_template, write_tokenizer

    write_tokenizer(folders[name], tmp_path, frames[name].chat_template)
    check_template(tmp_path, frames[name])
    again = load_frame(tmp_path)
    assert again.encode(TALK) == frames[name].encode(TALK)
    assert again.chat_template == template_of(tmp_path) == frames[name].chat_template


@FORMS
def test_counts_are_the_frames_and_parts_never_cost_more_than_counted(name, frames):
    counts = TokenCounts(frames[name])
    for talk in conversations(name):
        assert counts.whole(talk) == frames[name].cost(talk)
        assert counts.trained(talk) == sum(label != IGNORE_INDEX for label in frames[name].encode(talk).labels)
        assert counts.opening + counts.messages(talk) >= frames[name].cost(talk)
        assert counts.opening + counts.messages(talk) <= frames[name].cost(talk) + 3 * len(talk)


@FORMS
@pytest.mark.parametrize("has_system", [False, True])
def test_samples_that_are_split_fit(name, has_system, frames):
    frame = frames[name]
    is_held = has_system and "system" not in OTHER_FORMS[name].refuses
    turns = tuple(
        Message(role, f" {role} {at} keeps the lamp.\n\n守灯人在黄昏点灯 " * (1 + at % 7)) for at in range(12)
        for role in ("user", "assistant")
    )  # fmt: skip
    draft = Sample(messages=turns, source="dialog:x", sample_class="relation")
    system = SYSTEM.content if is_held else None
    split = Splitter(frame, max_seq_len=220, system_prompt=system).split(draft)
    prompt = [SYSTEM] if is_held else []
    assert len(split.samples) > 3
    assert all(frame.cost([*prompt, *sample.messages]) <= 220 for sample in split.samples)
    assert max(frame.cost([*prompt, *sample.messages]) for sample in split.samples) > 170
    said = "".join(turn.content for sample in split.samples for turn in sample.messages if turn.is_trained)
    assert said == "".join(turn.content for turn in turns if turn.role == "assistant")


def test_words_that_are_added_tokens_are_read_in_contents(frames, hugging_face):
    """Gemma's line breaks: no control tokens, so they stay what they are for the model."""
    frame, tokenizer = frames["gemma"], hugging_face["gemma"]
    assert tokenizer.convert_tokens_to_ids("\n\n") in frame.encode_text("a\n\nb")
    assert "\n\n" not in frame.controls


def test_a_vocabulary_that_could_spell_a_control_token_does_not():
    """A Unigram model holds its control tokens as pieces: `</s>` in a text would be one of them."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in "▁</s>amp")]
    whole = Tokenizer(models.Unigram(pieces, unk_id=0))
    whole.pre_tokenizer = pre_tokenizers.Metaspace()
    whole.add_special_tokens([AddedToken("</s>", normalized=False)])
    assert Tokenizer(whole.model).encode("a</s>").tokens == ["a", "</s>"]
    tokens = PartTokens(whole.to_str(), "{{ eos_token }}")
    (ids,) = tokens.encode(["a</s>map</s>"])
    assert [whole.id_to_token(token) for token in ids] == [*"a</s>map</s>"]


def test_added_words_keep_their_ids_beside_control_tokens_of_the_vocabulary():
    from tokenizers import AddedToken, Tokenizer, models

    whole = Tokenizer(models.BPE({"<s>": 0, "a": 1, "\n": 2}, []))
    whole.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("[END]", normalized=False)])
    whole.add_tokens([AddedToken("\n\n", normalized=False)])
    assert whole.token_to_id("\n\n") == 4
    assert PartTokens(whole.to_str(), "").encode(["a\n\na\n"]) == [[1, 4, 1, 2]]


def test_a_written_control_token_is_read_as_any_text():
    from tokenizers import AddedToken, Tokenizer, models

    whole = Tokenizer(models.BPE({"<": 0, "|": 1, "x": 2, ">": 3, "<|": 4}, [("<", "|")]))
    whole.add_special_tokens([AddedToken("<|x|>", normalized=False)])
    assert whole.encode("<|x|>").ids == [5]
    assert PartTokens(whole.to_str(), "").encode(["<|x|>"]) == [[4, 2, 1, 3]]


def test_the_date_is_left_out_where_the_template_can_do_without(frames, hugging_face):
    assert frames["llama3-dated"].chat_template.startswith(NO_CLOCK)
    rendered = hugging_face["llama3-dated"].apply_chat_template(as_chat(TALK), tokenize=False)
    assert "Today Date: 26 Jul 2024" in rendered
    assert "TOOLS" not in rendered


TURN = "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content']"
LOOP = "{% for message in messages %}{{ " + TURN + " + '<|eot_id|>' }}{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP.replace(" + '<|eot_id|>'", "") + ASK, "no control token ends an answer"),
        (LOOP + "{{ strftime_now('%Y') }}" + ASK, "its text depends on the date"),
        (LOOP.replace("in messages", "in messages[1:]") + ASK, "it leaves a turn out or says one twice"),
        (LOOP + LOOP, "it leaves a turn out or says one twice"),
        (LOOP.replace("message['content']", "(message['content'] | length | string) + message['content']") + ASK,
         "its own text depends on what the turns say"),
        (LOOP + ASK.replace("\n\n'", "\n\n<think>'"), "an answer is asked for otherwise than it is trained"),
        (LOOP + ASK + "{{ raise_exception('no plain chats here') }}", "no plain chats here"),
        (LOOP + "{% for %}", "Expected"),
        (LOOP + "{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused_with_the_reason(template, reason, folders, tmp_path):
    tokenizer_json = (folders["llama3"] / "tokenizer.json").read_text("utf-8")
    write_tokenizer_folder(tmp_path / "model", tokenizer_json, template)
    with pytest.raises(ProjectError, match="template_unrenderable") as caught:
        load_frame(tmp_path / "model")
    assert reason in caught.value.values["reason"]


def test_a_template_cannot_leave_its_sandbox(folders, tmp_path):
    tokenizer_json = (folders["llama3"] / "tokenizer.json").read_text("utf-8")
    escape = LOOP + "{{ messages.__class__.__mro__[1].__subclasses__() }}" + ASK
    write_tokenizer_folder(tmp_path / "model", tokenizer_json, escape)
    with pytest.raises(ProjectError, match="template_unrenderable"):
        load_frame(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "talk"),
    [
        ("gemma", (SYSTEM, *TALK)),
        ("gemma", (TALK[0], *TALK)),
        ("mistral", TALK[1:]),
        ("llama2", (TALK[0], *TALK)),
    ],
)
def test_conversations_that_the_template_refuses_are_told(name, talk, frames):
    assert frames[name].refusal(TALK) is None
    assert frames[name].refusal(talk)
    with pytest.raises(ProjectError, match="template_unrenderable"):
        frames[name].encode(talk)


def test_a_model_without_any_template_is_unknown(folders, tmp_path):
    (tmp_path / "tokenizer.json").write_text((folders["llama3"] / "tokenizer.json").read_text("utf-8"), "utf-8")
    with pytest.raises(ProjectError, match="template_unknown"):
        load_frame(tmp_path)


@pytest.mark.parametrize("template", [QWEN_TEMPLATE, CHAT_TEMPLATE, "{{ raise_exception('x') }}", "{% broken"])
def test_chatml_models_keep_the_houses_frame(template, chatml_tokenizer_json, tmp_path):
    folder = write_tokenizer_folder(tmp_path / "model", chatml_tokenizer_json, template)
    frame = load_frame(folder)
    assert type(frame) is Frame
    assert frame.is_chatml
    assert frame.chat_template == CHAT_TEMPLATE
    assert frame.digest == hashlib.sha256((chatml_tokenizer_json + CHAT_TEMPLATE).encode()).hexdigest()
    assert frame.encode(TALK) == Frame(chatml_tokenizer_json).encode(TALK)  # no default system prompt
    assert frame.cost(TALK) == TokenCounts(frame).whole(TALK) == TokenCounts(frame).messages(TALK)


def test_named_templates_and_tokens_in_objects_are_read(folders, tmp_path):
    form = OTHER_FORMS["llama3"]
    folder = write_other_folder(tmp_path / "m", form, (folders["llama3"] / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": form.template}]
    config["bos_token"] = {"content": form.bos, "__type": "AddedToken"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    assert load_frame(folder).encode(TALK) == load_frame(folders["llama3"]).encode(TALK)


def test_special_tokens_are_part_of_the_digest(folders):
    text = (folders["mistral"] / "tokenizer.json").read_text("utf-8")
    source = OTHER_FORMS["mistral"].template
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    one = TemplateFrame(text, ChatTemplate(source, tokens)).digest
    assert one != TemplateFrame(text, ChatTemplate(source, tokens | {"bos_token": ""})).digest
    assert one == TemplateFrame(text, ChatTemplate(source, dict(reversed(tokens.items())))).digest


@pytest.mark.parametrize("name", ["llama3", "llama3-dated", "mistral"])
def test_a_corpus_is_built_in_the_models_own_form(name, folders, frames, tmp_path):
    world = make_world(tmp_path, folders[name])
    manifest = build(load_request(world()))
    samples = [json.loads(line) for line in (world.out / "samples").read_text("utf-8").splitlines()]
    talks = [tuple(Message(turn["role"], turn["content"]) for turn in sample["messages"]) for sample in samples]
    told = sum(account.tokens for account in manifest.classes.values())
    # Mistral reads a system prompt together with the question after it, and the account adds them up.
    assert told == pytest.approx(sum(map(frames[name].cost, talks)), abs=2 if name == "mistral" else 0)
    assert all(frames[name].refusal(talk) is None for talk in talks)


def other_first(folder, tmp_path, text):
    """Build a dialog that begins with an answer; return the account of its file and the samples of it."""
    world = make_world(tmp_path, folder)
    (world.dialogs / "other-first.md").write_text(text, "utf-8")
    manifest = build(load_request(world()))
    (account,) = (file for file in manifest.files if "other-first" in str(file.path))
    lines = (world.out / "samples").read_text("utf-8").splitlines()
    return account, [row for row in map(json.loads, lines) if "other-first" in row["source"]]


def test_a_dialog_begins_with_a_question_where_the_template_wants_it_so(folders, tmp_path):
    text = "铸渊：早。\n冰朔：早\n铸渊：嗯。\n"
    account, rows = other_first(folders["mistral"], tmp_path, text)
    assert (account.units_read, account.units_kept, dict(account.drops)) == (3, 2, {"template_refused": 1})
    assert [turn["content"] for turn in rows[0]["messages"] if turn["role"] != "system"] == ["早", "嗯。"]


def test_a_conversation_that_the_template_refuses_is_left_out_and_counted(folders, tmp_path):
    world = make_world(tmp_path, folders["mistral"])
    talk = [{"role": role, "content": f"{role} speaks"} for role in ("user", "user", "assistant")]
    with (world.sources / "tool.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"messages": talk}) + "\n")
    manifest = build(load_request(world()))
    (account,) = (file for file in manifest.files if "tool.jsonl" in str(file.path))
    assert account.drops["template_refused"] == 1
    assert "speaks" not in (world.out / "samples").read_text("utf-8")


def test_a_dialog_may_begin_with_an_answer_elsewhere(folders, tmp_path):
    account, rows = other_first(folders["llama3"], tmp_path, "铸渊：早。\n冰朔：早\n铸渊：嗯。\n")
    assert (account.units_read, account.units_kept, dict(account.drops)) == (3, 3, {})
    assert len(rows) == 1


def test_a_system_prompt_that_the_template_refuses_stops_the_build(folders, tmp_path):
    with pytest.raises(ProjectError, match="template_unrenderable") as caught:
        build(load_request(make_world(tmp_path, folders["gemma"])()))
    assert "System role not supported" in caught.value.values["reason"]


def test_another_template_is_another_build(folders, tmp_path):
    shutil.copytree(folders["llama3"], tmp_path / "model")
    request = load_request(make_world(tmp_path, tmp_path / "model")())
    settle()
    first = build(request)
    assert find_unchanged(request) is not None
    template = OTHER_FORMS["llama3"].template.replace("<|end_header_id|>\n\n", "<|end_header_id|>\n")
    (tmp_path / "model/chat_template.jinja").write_text(template, "utf-8")
    assert find_unchanged(request) is None
    assert build(request).tokenizer != first.tokenizer
