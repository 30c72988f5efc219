"""The chat frame of a base model: messages -> segments of token ids, each trained or not. Pure, once it is loaded.

`load_frame` is the one place that decides how a model's conversations become ids: `Frame` is ChatML, the house's own
(`chatml.py`); `TemplateFrame` is any other form, as the model's own chat template writes it (`templates.py`):

    <s>[INST] Who are you? [/INST] I am Lumen.</s>
                                  [--- trained --]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

from corpus_builder.chatml import CHAT_TEMPLATE, IGNORE_INDEX, IM_END, IM_START, Encoded, Frame, Segment
from corpus_builder.errors import ProjectError
from corpus_builder.layouts import PAIR, Layout, Layouts
from corpus_builder.part_tokens import PartTokens
from corpus_builder.sample import Message
from corpus_builder.templates import ChatTemplate, read_template, template_of

__all__ = ["CHAT_TEMPLATE", "IGNORE_INDEX", "Encoded", "Frame", "Segment", "TemplateFrame", "load_frame", "template_of"]

_ASKED = (Message("user", "Who are you? 你是谁？"), Message("assistant", "I keep the lamp, every night. 晚安"))
#: Ordinary conversations: read in parts they must be what the tokenizer makes of the whole.
_PROBES = ((*_ASKED, *_ASKED), (Message("system", "You keep a lighthouse."), *_ASKED))
#: Characters after which a faster engine is built: below, building and proving it (0.3 s) takes longer than it saves
#: (0.9 s for a million tokens; benchmarks/results/prepare.md).
WORTH_IT = 1_000_000
#: Tokens by which a text may cost more in its place than by itself: a space before it, white space taken off.
_SLACK = 2


class TemplateFrame(Frame):
    """The form that a model's own chat template writes; labels by construction, from the template's literal texts.

    Raises:
        ProjectError: `template_unrenderable`: the template refuses a question with its answer, closes no answer
            with a control token, asks otherwise than it is trained, or is read otherwise in parts.
    """

    is_chatml = False

    def __init__(self, tokenizer_json: str, template: ChatTemplate) -> None:
        self._template = template
        try:
            self._tokens = PartTokens(tokenizer_json, template.named)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"no tokenizer: {error}") from error
        self._content = self._tokens.content
        self._layouts = Layouts(self._tokens, template)
        self.controls = self._tokens.controls
        self.tokenizer_json = tokenizer_json
        self.chat_template = template.source
        named = sorted(template.special_tokens.items())
        self.digest = hashlib.sha256(f"{tokenizer_json}{template.source}{named}".encode()).hexdigest()
        self.headers = {"assistant": self._layouts.header}
        self.im_start = self._layouts.header[0]
        self.im_end = self._layouts.of(PAIR).parts[-1].closing[-1]
        self._check()

    def encode_text(self, text: str) -> list[int]:
        return self._tokens.encode([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokens.encode(texts)

    def count_texts(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._tokens.encode(texts)]

    def refusal(self, messages: Sequence[Message]) -> str | None:
        try:
            self._layouts.of(_roles(messages))
        except ProjectError as error:
            return str(error.values["reason"])
        return None

    def contents(self, messages: Sequence[Message]) -> tuple[str, ...]:
        return tuple(part.text(messages) for part in self._layouts.of(_roles(messages)).parts)

    def segments(
        self, messages: Sequence[Message], encode: Callable[[str], Sequence[int]] | None = None
    ) -> list[Segment]:
        return self._fill(self._layouts.of(_roles(messages)), messages, encode or self.encode_text)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        layout = self._layouts.of(_roles(messages), asks=True)
        return list(chain.from_iterable(part.ids for part in self._fill(layout, messages, self.encode_text)))

    def system_cost(self, prompt: str) -> int:
        overhead = self._layouts.overhead
        return overhead(("system", *PAIR)) - overhead(PAIR) + len(self.encode_text(prompt))

    @cached_property
    def around(self) -> dict[str, int]:
        """As in ChatML, from how conversations grow by a turn; a little more where spaces are added or taken off."""
        holds, overhead = self._layouts.holds, self._layouts.overhead
        one, pair = overhead(PAIR), overhead(PAIR * 2) - overhead(PAIR)
        user = max(0, overhead((*PAIR, "user")) - one) if holds((*PAIR, "user")) else 0
        system = max(0, overhead(("system", *PAIR)) - one) if holds(("system", *PAIR)) else 0
        costs = {"system": system, "user": user, "assistant": max(0, pair - user), "tool": pair}
        return {role: cost + _SLACK for role, cost in costs.items()}

    @cached_property
    def opening_cost(self) -> int:
        overhead, probes = self._layouts.overhead, (PAIR, PAIR * 2, ("system", *PAIR), ("system", *PAIR * 2))
        asked = [roles for roles in probes if self._layouts.holds(roles)]
        return max(0, *(overhead(roles) - sum(self.around[role] - _SLACK for role in roles) for roles in asked))

    def _fill(self, layout: Layout, messages: Sequence[Message], read: Callable[[str], Sequence[int]]) -> list[Segment]:
        found: list[Segment] = []
        for part in layout.parts:
            found.append(Segment(part.before, is_trained=False))
            is_answer = part.role == "assistant"
            is_trained = is_answer and messages[part.slots[0].message].is_trained
            found.append(Segment((*read(part.text(messages)), *part.closing), is_trained, is_answer))
        found.append(Segment(layout.after, is_trained=False))
        return found

    def _check(self) -> None:
        """Raise unless ordinary conversations are read as the tokenizer reads the whole, and asked as trained."""
        for probe in _PROBES:
            roles = _roles(probe)
            if roles[0] == "system" and not self._layouts.holds(roles):
                continue
            whole = self._tokens.whole.encode(self._template.render(probe), add_special_tokens=False).ids
            if self.encode(probe).ids != whole:
                self._template.refuse("its tokenizer reads a whole conversation otherwise than its parts", roles)
            trained, asked = self._layouts.of(roles), self._layouts.of(roles[:-1], asks=True)
            if asked.after != trained.parts[-1].before:
                self._template.refuse("an answer is asked for otherwise than it is trained", roles)


def _roles(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message.role for message in messages)


def load_frame(base_model_dir: Path) -> Frame:
    """Return the frame of a Hugging Face model folder: the house's where it speaks ChatML, else its own.

    Raises:
        ProjectError: `base_model_missing`, `tokenizer_missing`, `template_unknown` (no ChatML tokens and no
            template), `template_unrenderable`.
    """
    if not base_model_dir.is_dir():
        raise ProjectError("base_model_missing", path=str(base_model_dir))
    try:
        text = (base_model_dir / "tokenizer.json").read_text("utf-8")
        template = read_template(base_model_dir)
        try:
            house = Frame(text)
        except ProjectError:
            if template is None:
                raise
            return TemplateFrame(text, template)
        return house if template is None or _speaks_chatml(template) else TemplateFrame(text, template)
    except (OSError, ValueError) as error:
        raise ProjectError("tokenizer_missing", path=str(base_model_dir)) from error


def _speaks_chatml(template: ChatTemplate) -> bool:
    """Whether a model's turns are ChatML's; some know its two tokens and speak otherwise (Phi-4's `<|im_sep|>`)."""
    if template.source == CHAT_TEMPLATE:
        return True
    try:
        rendered = template.render([Message("user", "a"), Message("assistant", "b")])
    except ProjectError:
        return True
    return f"{IM_START}user\na{IM_END}" in rendered
