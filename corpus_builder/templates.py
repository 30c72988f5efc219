"""A model's own chat template -> the literal texts around the contents of a conversation. Pure.

The template is rendered by its own rules, with a unique mark in place of every content. What stands between the
marks is the frame's; where a mark stands, a content does. So no content can be taken for the frame, and nothing is
found by comparing rendered lengths.

    roles (user, assistant)  ->  texts "<s>[INST] ", " [/INST] ", "</s>"   slots message 0, message 1

A template is somebody else's program: it runs in Jinja's sandbox, with the options and names that transformers gives
it (utils/chat_template_utils.py, 5.24), so that it says the same to whoever serves the model. The date is not given:
a template that asks for it says what it says where there is no clock, or is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from corpus_builder.errors import ProjectError
from corpus_builder.sample import Message

if TYPE_CHECKING:
    from jinja2 import Template

_BESIDE, _CONFIG, _SPECIAL = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
#: Where a model folder holds its template and the tokens that it names.
TEMPLATE_FILES = (_BESIDE, _CONFIG, _SPECIAL)
#: Private-use characters: no template and no text of a language holds them.
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
#: White space that a template either keeps around a content or trims.
_PAD = "\n\t"
#: In front of a template that asks for the date: the name becomes unknown to it, there as here.
NO_CLOCK = "{%- set strftime_now = a_clock_that_is_not_there %}"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the content of message `message` stands; `trims_*`: the template takes white space off that side."""

    message: int
    trims_left: bool
    trims_right: bool

    def fill(self, content: str) -> str:
        """Return `content` as the template would say it."""
        kept = content.lstrip() if self.trims_left else content
        return kept.rstrip() if self.trims_right else kept


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A conversation without its contents: text 0, slot 0, text 1, slot 1, …, the last text."""

    texts: tuple[str, ...]
    slots: tuple[Slot, ...]


class ChatTemplate:
    """One model's template with the special tokens that it may name.

    Attributes:
        source: The template as it is rendered, here and by whoever serves the model.
        special_tokens: `bos_token`, `eos_token`, … as the tokenizer's configuration names them.
        path: The model's folder, for errors.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, path: str = "") -> None:
        self.source = NO_CLOCK + source if "strftime_now" in source and not source.startswith(NO_CLOCK) else source
        self.special_tokens = dict(special_tokens)
        self.path = path
        self._skeletons: dict[tuple[tuple[str, ...], bool], Skeleton] = {}

    @property
    def named(self) -> str:
        """All texts in which a token is a control token: the template and the special tokens that it may name."""
        return "\n".join((self.source, *self.special_tokens.values()))

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Return the text of a conversation.

        Args:
            asks: Followed by what makes the model answer.

        Raises:
            ProjectError: `template_unrenderable`, with the template's own words where it has any.
        """
        from jinja2 import TemplateError

        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._compiled.render(
                messages=chat, tools=None, documents=None, add_generation_prompt=asks, **self.special_tokens
            )
        except TemplateError as error:
            self.refuse(self._words(error), [message.role for message in messages])
        except Exception as error:  # the template is foreign code: it may divide by zero
            self.refuse(f"{type(error).__name__}: {error}", [message.role for message in messages])

    def skeleton(self, roles: Sequence[str], *, asks: bool = False) -> Skeleton:
        """Return what stands around the contents of turns of `roles`; rendered once for each row of roles.

        Raises:
            ProjectError: `template_unrenderable`: the template refuses these roles, leaves a content out or says
                one twice.
        """
        key = (tuple(roles), asks)
        if key not in self._skeletons:
            self._skeletons[key] = self._make(*key)
        return self._skeletons[key]

    def refuse(self, reason: str, roles: Sequence[str] = ()) -> NoReturn:
        """Raise `template_unrenderable` for `reason`."""
        said = f"{reason} ({', '.join(roles)})" if roles else reason
        raise ProjectError("template_unrenderable", path=self.path, reason=said)

    def _make(self, roles: tuple[str, ...], asks: bool) -> Skeleton:
        marks = [f"{_OPEN}{at}{_CLOSE}" for at in range(len(roles))]
        bare = self.render([Message(*pair) for pair in zip(roles, marks, strict=True)], asks=asks)
        padded = self.render(
            [Message(role, f"{_PAD}{mark}{_PAD}") for role, mark in zip(roles, marks, strict=True)], asks=asks
        )
        texts, order = _parts(bare)
        if sorted(order) != list(range(len(roles))):
            self.refuse("it leaves a turn out or says one twice", roles)
        slots = tuple(
            Slot(at, trims_left=_PAD + marks[at] not in padded, trims_right=marks[at] + _PAD not in padded)
            for at in order
        )
        expected = "".join(
            text + ("" if slot is None else slot.fill(f"{_PAD}{marks[slot.message]}{_PAD}"))
            for text, slot in zip(texts, [*slots, None], strict=True)
        )
        if expected != padded:
            self.refuse("its own text depends on what the turns say", roles)
        return Skeleton(texts, slots)

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}…{% endgeneration %}`, by which some templates mark the answers: its body."""

            tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

            def parse(self, parser: Any) -> nodes.Node:
                line = next(parser.stream).lineno
                return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            self.refuse(self._words(error))

    def _words(self, error: Exception) -> str:
        said = str(error) or type(error).__name__
        return "its text depends on the date" if "strftime_now" in said or "a_clock_that" in said else said


def _parts(rendered: str) -> tuple[tuple[str, ...], list[int]]:
    """Return the texts around the marks and the messages that the marks stand for, in order."""
    pieces = _MARK.split(rendered)
    return tuple(pieces[::2]), [int(number) for number in pieces[1::2]]


def read_template(base_model_dir: Path) -> ChatTemplate | None:
    """Return the chat template that a model folder ships, None when it has none."""
    config = _json_object(base_model_dir / _CONFIG)
    source = _source_of(base_model_dir, config)
    if not source:
        return None
    named = _json_object(base_model_dir / _SPECIAL) | config
    tokens = {key: _token_text(value) for key, value in named.items() if key.endswith("_token")}
    return ChatTemplate(
        source, {key: text for key, text in tokens.items() if text is not None}, path=str(base_model_dir)
    )


def template_of(base_model_dir: Path) -> str:
    """Return the text of the chat template that a model folder ships, empty when it has none."""
    return _source_of(base_model_dir, _json_object(base_model_dir / _CONFIG))


def _source_of(base_model_dir: Path, config: Mapping[str, Any]) -> str:
    beside = base_model_dir / _BESIDE
    if beside.is_file():
        return beside.read_text("utf-8")
    packed = config.get("chat_template") or ""
    if isinstance(packed, list):  # several by name; `default` is what is used unasked
        packed = next((one["template"] for one in packed if one.get("name") == "default"), "")
    return str(packed)


def _token_text(value: Any) -> str | None:
    """Return a special token's text: configurations hold it plain or in an object."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _json_object(path: Path) -> dict[str, Any]:
    packed = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return packed if isinstance(packed, dict) else {}
