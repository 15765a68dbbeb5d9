"""How the C library hands out memory: what a process holds is more than what its tensors take.

Large blocks are mapped and given back at once. Smaller ones come from a heap that only shrinks from its end, so a block
that lives long keeps the holes below it. Which is which depends on what has been freed before: after a block of 30 MiB
was, all up to that size come from the heap (glibc's dynamic threshold, at most 32 MiB).
"""

import bisect
from collections.abc import Iterable

__all__ = ["Heap"]

LEAST_MAPPED = 128 * 1024
MOST_THRESHOLD = 32 * 2**20
ALIGNMENT = 64
SLACK = 96  # an aligned block needs a hole that is larger than itself


class Heap:
    """The addresses that a process has got from the system, for a row of blocks taken and given back.

    >>> heap = Heap()
    >>> first, second = heap.take(100_000), heap.take(100_000)
    >>> heap.give_back(first)  # a hole: the block above it still lives
    >>> heap.held
    200064
    """

    def __init__(self) -> None:
        self.most = 0
        self._mapped = 0
        self._top = 0
        self._threshold = LEAST_MAPPED
        self._holes: list[tuple[int, int]] = []  # (start, size), sorted, no two of them touch
        self._blocks: dict[int, tuple[int | None, int]] = {}
        self._next = 0

    @property
    def held(self) -> int:
        """Bytes that the process holds now."""
        return self._mapped + self._top

    def take(self, size: int) -> int:
        """Take a block; return its number."""
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        if size >= self._threshold:
            start = None
            self._mapped += size
        else:
            start = self._place(size)
        self.most = max(self.most, self.held)
        self._next += 1
        self._blocks[self._next] = (start, size)
        return self._next

    def give_back(self, number: int) -> None:
        """Give a block back."""
        start, size = self._blocks.pop(number)
        if start is None:
            self._mapped -= size
            if size <= MOST_THRESHOLD:
                self._threshold = max(self._threshold, size)
            return
        self._open(start, size)

    def replay(self, events: Iterable[tuple[int, int | None]]) -> list[int]:
        """Take and give back blocks as (name, size) and (name, None) say; return the numbers of those that are left."""
        numbers: dict[int, int] = {}
        for name, size in events:
            if size is None:
                self.give_back(numbers.pop(name))
            else:
                numbers[name] = self.take(size)
        return list(numbers.values())

    def _place(self, size: int) -> int:
        """Return where a block of the heap goes: into the smallest hole that holds it, else on top."""
        fitting = [(hole[1], index) for index, hole in enumerate(self._holes) if hole[1] >= size + SLACK]
        if not fitting:
            start, self._top = self._top, self._top + size
            return start
        _, index = min(fitting)
        start, room = self._holes.pop(index)
        if room > size:
            self._holes.insert(index, (start + size, room - size))
        return start

    def _open(self, start: int, size: int) -> None:
        """Make a hole, join it with those it touches, and give the end of the heap back where it is large."""
        index = bisect.bisect(self._holes, (start, 0))
        if index < len(self._holes) and self._holes[index][0] == start + size:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            start, before = self._holes.pop(index - 1)
            size, index = size + before, index - 1
        if start + size == self._top and size >= 2 * self._threshold:
            self._top = start
        else:
            self._holes.insert(index, (start, size))
