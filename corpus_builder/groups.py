"""Things that belong together: union and find over numbers. Pure."""

from __future__ import annotations

from array import array


class Groups:
    """Numbers from 0 on, each alone at first; a group is named by its least member."""

    def __init__(self, count: int) -> None:
        self._parents = array("L", range(count))

    def find(self, number: int) -> int:
        """Return the least member of the number's group."""
        parents = self._parents
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    def join(self, one: int, other: int) -> None:
        """Make one group of two."""
        least, most = sorted((self.find(one), self.find(other)))
        self._parents[most] = least
