"""Are these labels right? Two proofs of every sample that know nothing of how it was made. Pure.

A scan of the ids must find the very answers that the labels were made of (`mask.py`), and what is learned must read as
every trained turn with its stop token. Never is the first token of a sample learned: nothing stands before it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from corpus_builder.frame import Frame
from corpus_builder.mask import build_assistant_mask, build_assistant_masks
from corpus_builder.token_bytes import NO_TEXT, STOP, TokenBytes
from trainer.conversations import Conversations
from trainer.rendered import Rendered

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_STOP = bytes([STOP])


class LabelCheck:
    """Checks the labels of one corpus.

    A byte-level vocabulary is read as bytes, a whole block at once. What differs there, and every other vocabulary,
    goes turn by turn through the tokenizer's own decoder.
    """

    def __init__(self, talks: Conversations, frame: Frame) -> None:
        self._talks, self._frame = talks, frame
        self._bytes = TokenBytes(frame.spelling, frame.stop)

    def wrong(self, samples: NDArray[np.int64], rendered: Rendered) -> NDArray[np.bool_]:
        """Return which of `samples` (N,) have labels that are not proved."""
        firsts = rendered.starts[:-1]
        is_wrong: NDArray[np.bool_] = rendered.is_trained[firsts].copy()
        differs = (self._scan(rendered) != rendered.is_answer) | (rendered.is_trained & ~rendered.is_answer)
        is_wrong[np.searchsorted(firsts, np.flatnonzero(differs), side="right") - 1] = True
        is_wrong[self._misread(samples, rendered)] = True
        return is_wrong

    def _scan(self, rendered: Rendered) -> NDArray[np.bool_]:
        """Return which tokens a look at the ids alone takes for an answer's."""
        opening, *header = self._frame.answer_opening
        found = {"im_start": opening, "im_end": self._frame.stop}
        if self._frame.stop not in self._frame.answer_opening:
            return build_assistant_masks(rendered.ids, rendered.starts, **found, assistant_header=header)
        parts = np.split(rendered.ids, rendered.starts[1:-1])
        masks = (build_assistant_mask(part.tolist(), **found, assistant_header=header) for part in parts)
        return np.fromiter(chain.from_iterable(masks), dtype=np.bool_, count=len(rendered.ids))

    def _misread(self, samples: NDArray[np.int64], rendered: Rendered) -> list[int]:
        """Return the positions in `samples` whose learned tokens don't read as their trained turns."""
        learned = rendered.ids[rendered.is_trained]
        turns = self._talks.turns_of(samples)
        spoken = self._talks.content_at[turns[self._talks.is_trained[turns]]].tolist()
        if self._bytes.reads(learned, _as_bytes([self._talks.contents[at] for at in spoken])):
            return []
        found, ends = self._bytes.decode(learned)
        tokens_before = np.concatenate([[0], np.cumsum(rendered.is_trained)])[rendered.starts]
        byte_ends = np.concatenate([[0], ends])[tokens_before].tolist()
        return [
            at
            for at, sample in enumerate(samples.tolist())
            if not self._reads_as(
                self._talks.trained_texts(sample),
                found[byte_ends[at] : byte_ends[at + 1]].tobytes(),
                learned[tokens_before[at] : tokens_before[at + 1]],
            )
        ]

    def _reads_as(self, texts: list[str], found: bytes, learned: NDArray[np.int32]) -> bool:
        """Whether the learned tokens of a sample, and the bytes `found` in them, are its trained turns."""
        if found in (_as_bytes(texts), _as_bytes([_nfc(text) for text in texts])):
            return True
        if self._frame.is_chatml and NO_TEXT not in found:
            return False  # a byte-level vocabulary, and it says something else
        stops = np.flatnonzero(learned == self._frame.stop)
        turns = [turn.tolist() for turn in np.split(learned, stops + 1)]
        if len(turns) != len(texts) + 1 or turns[-1]:
            return False
        # A tokenizer or a template may put a space before an answer or trim it; inside it is as it was written.
        decoded = (self._decoder.decode(turn[:-1], skip_special_tokens=False) for turn in turns[:-1])
        return all(
            text.strip() in (wanted.strip(), _nfc(wanted).strip()) for text, wanted in zip(decoded, texts, strict=True)
        )

    @cached_property
    def _decoder(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._frame.tokenizer_json)


def _as_bytes(texts: Sequence[str]) -> bytes:
    """Return what is learned of `texts`: each in UTF-8, then its stop token."""
    return b"".join(chain.from_iterable((text.encode("utf-8", "surrogatepass"), _STOP) for text in texts))


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
