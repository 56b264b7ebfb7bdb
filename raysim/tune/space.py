"""What a sweep may give one setting: `{grid: [1, 2]}` and its kin."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysim.errors import ConfigError, unknown

KINDS = {
    "grid": "[A, B, ...]: every one of these",
    "choice": "[A, B, ...]: one of these, drawn",
    "uniform": "[LOW, HIGH]: a number between",
    "loguniform": "[LOW, HIGH]: a number between, by its logarithm",
    "randint": "[LOW, HIGH]: a whole number from LOW to below HIGH",
    "quniform": "[LOW, HIGH, STEP]: a multiple of STEP between",
}


@dataclass(frozen=True)
class Space:
    """The values of one setting. A grid is run through; the others are drawn from."""

    kind: str
    values: tuple[Any, ...]

    @classmethod
    def read(cls, key: str, found: Mapping[Any, Any], where: str) -> "Space":
        """From a file's `{grid: [1, 2]}`, or an error that says what belongs there."""
        if len(found) != 1:
            kinds = ", ".join(KINDS)
            raise ConfigError(
                f"{where}: {key} is {dict(found)}; expected one of {kinds}, such as "
                f"'{key}: {{grid: [A, B]}}'"
            )
        ((kind, values),) = found.items()
        if kind not in KINDS:
            raise unknown("search space", str(kind), KINDS, f"{where}, {key}")
        if not isinstance(values, list):
            raise ConfigError(f"{where}: {key}: {kind} takes {KINDS[kind]}; got {values!r}")
        if not values:
            raise ConfigError(f"{where}: {key}: {kind} has no values; it takes {KINDS[kind]}")
        space = cls(kind, tuple(values))
        if not space.discrete:
            space = cls(kind, space._limits(key, where))
        return space

    def _limits(self, key: str, where: str) -> tuple[Any, ...]:
        takes = f"{where}: {key}: {self.kind} takes {KINDS[self.kind]}"
        wanted = 3 if self.kind == "quniform" else 2
        try:
            numbers = tuple(float(value) for value in self.values)  # YAML reads 1e-3 as text
        except (TypeError, ValueError):
            raise ConfigError(f"{takes}; got {list(self.values)}") from None
        if len(numbers) != wanted or not all(map(math.isfinite, numbers)):
            raise ConfigError(f"{takes}; got {list(self.values)}")
        if not numbers[0] < numbers[1]:
            raise ConfigError(f"{takes}, and LOW below HIGH; got {list(self.values)}")
        if self.kind == "loguniform" and numbers[0] <= 0:
            raise ConfigError(f"{takes}, and LOW above 0; got {list(self.values)}")
        if self.kind == "quniform" and not 0 < numbers[2] <= numbers[1] - numbers[0]:
            raise ConfigError(f"{takes}, and STEP above 0 and within; got {list(self.values)}")
        whole = not any(number % 1 for number in numbers)
        if self.kind == "randint" and not whole:
            raise ConfigError(f"{takes}; got {list(self.values)}")
        return (
            tuple(map(int, numbers)) if self.kind in ("randint", "quniform") and whole else numbers
        )

    @property
    def discrete(self) -> bool:
        return self.kind in ("grid", "choice")

    @property
    def whole(self) -> bool:
        """Whether a range gives whole numbers: randint, and quniform between such in such steps."""
        return not self.discrete and all(isinstance(value, int) for value in self.values)

    @property
    def logarithmic(self) -> bool:
        return self.kind == "loguniform"

    def samples(self) -> list[Any]:
        """Values that show whether a setting takes this space's: all of a list; of a range both
        ends and, where it gives fractions, one."""
        if self.discrete:
            return list(self.values)
        low, high = self.values[:2]
        if self.whole:
            return [low, high - 1]
        return [low, high, low + (high - low) * 0.41421356]

    def domain(self, by_index: bool = False) -> Any:
        """As Ray Tune has it. `by_index` gives positions in place of a list's values, for searchers
        that take only plain ones."""
        from ray import tune

        if self.discrete:
            return tune.choice(list(range(len(self.values)) if by_index else self.values))
        return getattr(tune, self.kind)(*self.values)

    def draw(self, random: Any) -> Any:
        """One value, from a numpy RandomState."""
        value = self.domain(by_index=True).sample(random_state=random)
        if self.discrete:
            return self.values[int(value)]
        return int(value) if self.whole else float(value)

    def clip(self, value: Any) -> Any:
        """The nearest value within a range; a list's values are their own."""
        return value if self.discrete else min(max(value, self.values[0]), self.values[1])
