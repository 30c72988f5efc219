"""Which tokens of a rendered conversation are the assistant's: a scan of token ids, independent of the frame. Pure.

The second opinion: `frame.py` labels by construction, this module by looking at ids only, and the trainer goes
on only where both agree. `build_assistant_mask` is the reference; `build_assistant_masks` says the same of many
conversations at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def build_assistant_mask(
    ids: Sequence[int], *, im_start: int, im_end: int, assistant_header: Sequence[int]
) -> list[bool]:
    """Return for each token whether it is part of an assistant turn, its stop token included.

    Args:
        ids: (T,) token ids of one rendered conversation.
        im_start: Id that opens a turn.
        im_end: Id that closes a turn.
        assistant_header: Ids between `im_start` and the assistant's content, i.e. of `assistant\\n`.

    Returns:
        (T,) True from the first token of the assistant's content up to and including `im_end`; up to the end
        where the turn is not closed.

    Raises:
        TypeError: `ids` is not a sequence of whole numbers (a BatchEncoding, a string, a list of key names).
    """
    if isinstance(ids, (str, bytes)) or not all(isinstance(token, int) for token in ids):
        raise TypeError(f"token ids are whole numbers, got {type(ids).__name__}")
    header = list(assistant_header)
    mask = [False] * len(ids)
    at = 0
    while at < len(ids):
        content = at + 1 + len(header)
        if ids[at] != im_start or list(ids[at + 1 : content]) != header:
            at += 1
            continue
        end = next((i for i in range(content, len(ids)) if ids[i] == im_end), len(ids) - 1)
        mask[content : end + 1] = [True] * (end + 1 - content)
        at = end + 1
    return mask


def build_assistant_masks(
    ids: NDArray[np.int32], starts: NDArray[np.int64], *, im_start: int, im_end: int, assistant_header: Sequence[int]
) -> NDArray[np.bool_]:
    """Return `build_assistant_mask` of many conversations, without a step per token.

    Args:
        ids: (T,) token ids, conversation after conversation.
        starts: (N + 1,) where each begins; the last entry is T.

    Returns:
        (T,) as of each conversation by itself.

    Raises:
        ValueError: `im_end` is `im_start` or part of the header: turns could then overlap, which only the reference
            follows.
    """
    import numpy as np

    if im_end in (im_start, *assistant_header):
        raise ValueError(f"token {im_end} can't both open and close a turn")
    opened = np.flatnonzero(ids == im_start)
    for offset, token in enumerate(assistant_header, start=1):
        opened = opened[opened + offset < len(ids)]
        opened = opened[ids[opened + offset] == token]
    sample_ends = starts[np.searchsorted(starts, opened, side="right")]
    is_inside = opened + len(assistant_header) < sample_ends
    contents, sample_ends = opened[is_inside] + 1 + len(assistant_header), sample_ends[is_inside]
    closed = np.append(np.flatnonzero(ids == im_end), len(ids))
    ends = np.minimum(closed[np.searchsorted(closed, contents)] + 1, sample_ends)
    # What opens inside a turn is closed with it: of all that end in one place, the first is the turn.
    is_turn = np.diff(ends, prepend=-1) != 0
    steps = np.zeros(len(ids) + 1, dtype=np.int8)
    steps[contents[is_turn]] += 1
    steps[ends[is_turn]] -= 1
    return np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)
