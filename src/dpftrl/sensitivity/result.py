"""The result of every sensitivity computation."""

from dataclasses import dataclass
from typing import Literal, Self, final

from dpftrl.participation import Pattern

Kind = Literal["exact", "upper bound"]

# Two ways of summing the same terms differ by rounding; bounds this close to attained are attained.
ROUNDING = 1e-12


@final
@dataclass(frozen=True)
class Sensitivity:
    """The largest L2 norm that one client can add to the strategy's output, at clip norm 1.

    Attributes:
        value: The sensitivity, or a number that it cannot exceed.
        lower_bound: What the worst pattern found really attains; equal to `value` when exact.
        pattern: A pattern that attains `lower_bound`, where it is short enough to be worth keeping.

    Guarantees:
        `value` is never below the true sensitivity under the participation it was computed for,
        which holds if every client keeps to that participation and every update to the clip norm.
    """

    value: float
    lower_bound: float
    pattern: Pattern | None = None

    @classmethod
    def exact(cls, value: float, pattern: Pattern | None = None) -> Self:
        """The true sensitivity."""
        return cls(value, value, pattern)

    @classmethod
    def between(
        cls, lower_bound: float, upper_bound: float, pattern: Pattern | None = None
    ) -> Self:
        """An upper bound, or the exact value where the pattern found attains it."""
        if upper_bound <= lower_bound * (1 + ROUNDING):
            return cls.exact(max(upper_bound, lower_bound), pattern)
        return cls(upper_bound, lower_bound, pattern)

    def times(self, scale: float) -> Self:
        """The sensitivity of a strategy so many times as large."""
        return type(self)(self.value * scale, self.lower_bound * scale, self.pattern)

    @property
    def kind(self) -> Kind:
        """Whether `value` is the sensitivity itself or only bounds it from above."""
        return "exact" if self.value == self.lower_bound else "upper bound"

    def __float__(self) -> float:
        return self.value
