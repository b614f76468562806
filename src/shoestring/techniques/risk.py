"""What a technique does to the result: nothing, nothing that was found to matter, or something."""

from enum import IntEnum

from ..errors import ShoestringError


class Risk(IntEnum):
    """The order in which the planner spends them."""

    EXACT = 0  # the same numbers
    NEUTRAL = 1  # other numbers, and no loss of quality, or less than half a point, in the papers' evidence
    APPROXIMATE = 2  # quality is traded for memory

    @classmethod
    def named(cls, name: str) -> "Risk":
        if name.upper() not in cls.__members__:
            raise ShoestringError(f"there is no risk {name!r}: use exact, neutral or approximate")
        return cls[name.upper()]
