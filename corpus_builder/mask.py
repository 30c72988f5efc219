"""Which tokens of a rendered conversation are the assistant's: a scan of token ids, independent of the frame. Pure.

The second opinion: `frame.py` labels by construction, this module by looking at ids only, and the trainer goes
on only where both agree.
"""

from __future__ import annotations

from collections.abc import Sequence


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
