"""A sample longer than the window -> samples that fit; no turn is cut off, each answer is trained exactly once. Pure.

Dialogs are cut on turn borders; the turns before a window stand in it as context (`train: false`) where they fit.
An answer longer than the window becomes numbered parts of the same question, whose texts joined are the answer:

    user: Read a.md to me. (1/3)   assistant: first part, up to a heading …

What cannot be in a sample (a question beyond half a window, turns after the last answer) is handed back by reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from corpus_builder.cut import cut_text, tail_that_fits
from corpus_builder.errors import ProjectError
from corpus_builder.frame import Frame
from corpus_builder.sample import Message, Sample
from corpus_builder.token_counts import TokenCounts

Turns = tuple[Message, ...]

#: Replicas ask in other words, some longer than others; with room in steps their parts are the same texts.
_ROOM_STEP = 32


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Text of one turn that is in no sample, and why: `question_beyond_window` or `no_answer`."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """One draft, split: samples that fit, and what was left out."""

    samples: tuple[Sample, ...]
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows without their system prompt."""

    turns: list[Turns]
    left_out: list[LeftOut]


class Splitter:
    """Splits samples at `max_seq_len` tokens; room for the plan's system prompt is always kept.

    Attributes:
        counts: The token counts that it works with, for whoever accounts for its samples.
    """

    def __init__(self, frame: Frame, *, max_seq_len: int, system_prompt: str | None) -> None:
        self.counts = TokenCounts(frame)
        self._max_seq_len = max_seq_len
        self._reserved = self.counts.messages([Message("system", system_prompt)]) if system_prompt else 0

    def split(self, draft: Sample) -> Split:
        """Return the samples of `draft`, each within the window.

        Raises:
            ProjectError: `window_too_small`, when the window leaves no room for an answer.
        """
        system = draft.messages[:1] if has_own_system(draft.messages) else ()
        turns = draft.messages[len(system) :]
        limit = self._max_seq_len - self.counts.opening
        limit -= self.counts.messages(system) if system else self._reserved
        if self.counts.messages(turns) <= limit:
            return Split((draft,))
        windows = self._windows(turns, limit)
        samples = tuple(replace(draft, messages=(*system, *window)) for window in windows.turns)
        return Split(samples, tuple(windows.left_out))

    def _windows(self, turns: Turns, limit: int) -> _Windows:
        windows = _Windows([], [])
        targets = [at for at, turn in enumerate(turns) if turn.is_trained]
        start = 0
        while targets and start <= targets[-1]:
            first = targets[bisect_left(targets, start)]
            context = self._context(turns, start, first, limit)
            end = self._end(turns, start, limit - self.counts.messages(context))
            if end > start:
                windows.turns.append((*context, *turns[start:end]))
            else:
                end = first + 1
                self._add_long_round(windows, turns[start:first], turns[first], limit)
            start = end
        self._add_trailing(windows, turns[start:], limit)
        return windows

    def _context(self, turns: Turns, start: int, first: int, limit: int) -> Turns:
        """Return the turns before `start`, in up to a quarter of the window; a whole round where one fits at all."""
        room = limit - self.counts.messages(turns[start : first + 1])
        spent, begin, has_question = 0, start, False
        while begin > 0:
            spent += self.counts.messages(turns[begin - 1 : begin])
            if spent > room or (has_question and spent > limit // 4):
                break
            begin -= 1
            has_question = has_question or turns[begin].role == "user"
        while begin < start and turns[begin].role == "assistant":
            begin += 1  # context begins with a question
        return tuple(replace(turn, train=False) if turn.is_trained else turn for turn in turns[begin:start])

    def _end(self, turns: Turns, start: int, room: int) -> int:
        """Return where the longest window from `start` ends, after an answer; `start` if none fits."""
        end = start
        for at in range(start, len(turns)):
            room -= self.counts.messages(turns[at : at + 1])
            if room < 0:
                break
            if turns[at].is_trained:
                end = at + 1
        return end

    def _add_long_round(self, windows: _Windows, question: Turns, answer: Message, limit: int) -> None:
        """Add an answer that doesn't fit in one window with all of its question."""
        room = max(limit // 2, limit - self.counts.messages([answer]))
        asked, left_out = self._shortened(question, room)
        windows.left_out.extend(left_out)
        windows.turns.extend(self._parts(asked, answer, limit))

    def _shortened(self, question: Turns, room: int) -> tuple[Turns, list[LeftOut]]:
        """Return the end of `question` in at most `room` tokens, and the rest."""
        kept: list[Message] = []
        left_out: list[LeftOut] = []
        for turn in reversed(question):
            cost = self.counts.messages([turn])
            if cost <= room:
                kept.insert(0, turn)
                room -= cost
                continue
            overhead = cost - self.counts.text(turn.content)
            tail = tail_that_fits(turn.content, room - overhead, self.counts) if room > overhead else ""
            if tail:
                kept.insert(0, replace(turn, content=tail))
            left_out.insert(0, LeftOut("question_beyond_window", turn.content[: len(turn.content) - len(tail)]))
            room = 0
        return tuple(kept), left_out

    def _parts(self, question: Turns, answer: Message, limit: int) -> list[Turns]:
        """Return the windows of one answer: as few parts as fit, numbered where there are several."""
        room = limit - self.counts.messages([*question, replace(answer, content="")])
        if self.counts.text(answer.content) > room > _ROOM_STEP**2:
            room -= room % _ROOM_STEP
        while room > 0:
            pieces = cut_text(answer.content, room, self.counts)
            windows = [
                (*numbered(question, part, len(pieces)), replace(answer, content=piece))
                for part, piece in enumerate(pieces, start=1)
            ]
            excess = max(self.counts.messages(window) for window in windows) - limit
            if excess <= 0:
                return windows
            room -= excess  # the numbers in the question cost tokens as well
        raise ProjectError("window_too_small", limit=self._max_seq_len)

    def _add_trailing(self, windows: _Windows, trailing: Turns, limit: int) -> None:
        """Keep the turns after the last answer as context where they fit."""
        if trailing and windows.turns and self.counts.messages((*windows.turns[-1], *trailing)) <= limit:
            windows.turns[-1] += trailing
        else:
            windows.left_out.extend(LeftOut("no_answer", turn.content) for turn in trailing)


def has_own_system(messages: Sequence[Message]) -> bool:
    """Whether a conversation opens with a system prompt of its own."""
    return bool(messages) and messages[0].role == "system"


def numbered(question: Turns, part: int, parts: int) -> Turns:
    """Return `question` asking for one of several parts: `… (2/3)` after the last thing that the user says."""
    last = max((at for at, turn in enumerate(question) if turn.role == "user"), default=None)
    if parts == 1 or last is None:
        return question
    asked = replace(question[last], content=f"{question[last].content} ({part}/{parts})")
    return (*question[:last], asked, *question[last + 1 :])
