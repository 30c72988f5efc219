"""ChatML, the house's frame: messages -> segments of token ids, each trained or not. Pure; `frame.py` is its door.

Every part is encoded by itself, so content never changes the frame's tokens: a leading newline keeps its header, a
literal `<|im_end|>` in a text is text. No default system prompt ever slips in: what the messages say is trained.

    <|im_start|>user\\nWho are you?<|im_end|>\\n<|im_start|>assistant\\nI am Lumen.<|im_end|>\\n
                                                                   [---- trained ----------]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from corpus_builder.errors import ProjectError
from corpus_builder.sample import ROLES, Message

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
IGNORE_INDEX = -100  # torch.nn.CrossEntropyLoss's default `ignore_index`
#: Saved beside every model we train: the frame as a template that says nothing of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of token ids with one fate: trained, or context. `is_answer`: part of an assistant turn (and its stop)."""

    ids: tuple[int, ...]
    is_trained: bool
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """One conversation: `ids` and `labels` (T,), labels IGNORE_INDEX where nothing is learned. Not shifted."""

    ids: list[int]
    labels: list[int]


class Frame:
    """ChatML over one base model's tokenizer.

    Attributes:
        is_chatml: Whether this is the house's ChatML and not a form of the model's own.
        chat_template: What the trained model's folder says to whoever serves it; equal to this frame.
        im_start, im_end: ids that open and close a turn; in another form the first id of an answer's header, and
            the token that ends an answer.
        controls: Added tokens by their text, which no content becomes.
        tokenizer_json: What it was made of.
        digest: sha256 hex digits of tokenizer and frame; part of a manifest and of every cache key.
    """

    is_chatml: bool = True
    chat_template: str = CHAT_TEMPLATE

    def __init__(self, tokenizer_json: str) -> None:
        from tokenizers import Tokenizer

        try:
            whole = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"no tokenizer: {error}") from error
        controls = {token.content: number for number, token in whole.get_added_tokens_decoder().items()}
        if IM_START not in controls or IM_END not in controls:
            raise ProjectError("template_unknown", tokens=f"{IM_START} {IM_END}")
        self.im_start: int = controls[IM_START]
        self.im_end: int = controls[IM_END]
        self.controls: dict[str, int] = controls
        # Without its added tokens the tokenizer can only read text, so content can never become a control token.
        # The post-processor stays behind too: it could wrap each part in begin and end tokens.
        self._content = Tokenizer(whole.model)
        if whole.normalizer is not None:
            self._content.normalizer = whole.normalizer
        if whole.pre_tokenizer is not None:
            self._content.pre_tokenizer = whole.pre_tokenizer
        self.tokenizer_json = tokenizer_json
        self.digest = hashlib.sha256((tokenizer_json + CHAT_TEMPLATE).encode()).hexdigest()

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of `text` as content: never a control token."""
        return list(self._content.encode(text, add_special_tokens=False).ids)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; one call of the tokenizer's batch encoder."""
        return [encoding.ids for encoding in self._content.encode_batch_fast(list(texts), add_special_tokens=False)]

    def spelling(self, token: int) -> str | None:
        """Return how the vocabulary spells an id, None where it has no such id."""
        found: str | None = self._content.id_to_token(token)
        return found

    def cut_at_tokens(self, text: str) -> list[str]:
        """Return `text` in the pieces that its tokens stand for; tokens of one character stay together."""
        offsets = self._content.encode(text, add_special_tokens=False).offsets
        starts = [0, *sorted({start for start, _ in offsets if 0 < start < len(text)}), len(text)]
        return [text[start:end] for start, end in pairwise(starts)]

    def count_texts(self, texts: Sequence[str]) -> list[int]:
        """Return how many ids each text has; one call of the tokenizer's batch encoder."""
        return [len(found) for found in self._content.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_ends(self, text: str) -> list[int]:
        """Return where each token of `text` ends, in characters, ascending."""
        return [end for _, end in self._content.encode(text, add_special_tokens=False).offsets]

    @cached_property
    def newline(self) -> tuple[int, ...]:
        """The ids of the newline after each turn."""
        return tuple(self.encode_text("\n"))

    @cached_property
    def headers(self) -> dict[str, tuple[int, ...]]:
        """The ids of `<|im_start|>role\\n` by role."""
        return {role: (self.im_start, *self.encode_text(f"{role}\n")) for role in ROLES}

    @cached_property
    def around(self) -> dict[str, int]:
        """Tokens that a turn costs beyond its content, by role: header, stop token, newline; never less."""
        return {role: len(header) + 1 + len(self.newline) for role, header in self.headers.items()}

    @property
    def opening_cost(self) -> int:
        """Tokens that a conversation costs once, beyond its turns."""
        return 0

    @property
    def turn_cost(self) -> int:
        """Tokens that a turn of the dearest role costs beyond its content."""
        return max(self.around.values())

    @property
    def answer_opening(self) -> tuple[int, ...]:
        """The ids right before every answer: what a scan looks for."""
        return self.headers["assistant"]

    @property
    def stop(self) -> int:
        """The id that ends an answer, and is trained with it."""
        return self.im_end

    def refusal(self, messages: Sequence[Message]) -> str | None:
        """Return why the frame can't hold a conversation of these roles, None when it can."""
        return None

    def contents(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """Return the texts that `segments` asks the ids of."""
        return tuple(message.content for message in messages)

    def system_cost(self, prompt: str) -> int:
        """Return the tokens that a system prompt adds to a conversation."""
        return self.cost([Message("system", prompt)])

    def segments(
        self, messages: Sequence[Message], encode: Callable[[str], Sequence[int]] | None = None
    ) -> list[Segment]:
        """Return the segments of a conversation; joined, they are its ids.

        Args:
            messages: The turns, in order.
            encode: Text -> ids, for callers that hold the ids of all `contents` already.
        """
        read = encode or self.encode_text
        found: list[Segment] = []
        for message in messages:
            found.append(Segment(self.headers[message.role], is_trained=False))
            is_answer = message.role == "assistant"
            found.append(Segment((*read(message.content), self.im_end), message.is_trained, is_answer))
            found.append(Segment(self.newline, is_trained=False))
        return found

    def encode(self, messages: Sequence[Message], encode: Callable[[str], Sequence[int]] | None = None) -> Encoded:
        """Return the ids and labels of a conversation; labels are right by construction."""
        parts = self.segments(messages, encode)
        ids = list(chain.from_iterable(part.ids for part in parts))
        labels = list(
            chain.from_iterable(part.ids if part.is_trained else (IGNORE_INDEX,) * len(part.ids) for part in parts)
        )
        return Encoded(ids, labels)

    def cost(self, messages: Sequence[Message]) -> int:
        """Return the tokens of a conversation."""
        return sum(len(segment.ids) for segment in self.segments(messages))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids after which the model answers."""
        return [*chain.from_iterable(part.ids for part in self.segments(messages)), *self.headers["assistant"]]
