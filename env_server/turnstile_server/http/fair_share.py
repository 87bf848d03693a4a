"""A bounded amount that many owners share, so that none of them can use it up for the others.

The rule is that of shared packet buffers (Choudhury and Hahne, "Dynamic Queue Length Thresholds", 1998): an owner
may hold at most as much as then stays free for everybody else. One owner alone gets half, ``n`` greedy ones get
``n / (n + 1)`` together, so what stays free shrinks as more of them come, and an owner that holds little still
finds room. Owners that hold one unit each can use all of it. Where nothing is left, those who hold most give way
(``Intake.push_out``).
"""

from __future__ import annotations


class FairShare:
    """``total`` units. Knows owners by name, and forgets one that holds nothing."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: dict[str, int] = {}
        self._taken = 0

    @property
    def taken(self) -> int:
        """Units that all owners hold together."""
        return self._taken

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def take(self, owner: str, amount: int = 1) -> bool:
        """Takes ``amount`` for ``owner``; False, with nothing changed, where its share does not allow it.

        Where nobody holds anything, one request gets what it asks for, so that a limit set too low makes requests
        wait for each other, and refuses none for ever.
        """
        left = self.total - self._taken - amount
        if self._taken and (left < 0 or self.held(owner) + amount > left + 1):
            return False
        self.take_anyway(owner, amount)
        return True

    def take_anyway(self, owner: str, amount: int = 1) -> None:
        """Takes ``amount`` whatever is left: for an owner to whom another one is just giving way."""
        self._held[owner] = self.held(owner) + amount
        self._taken += amount

    def give(self, owner: str, amount: int = 1) -> None:
        """Gives back what ``take`` took."""
        left = self._held[owner] - amount
        if left:
            self._held[owner] = left
        else:
            del self._held[owner]
        self._taken -= amount
