"""Do part of a recipe several times."""

from typing import Any

from smallbert.errors import UserError
from smallbert.methods import Method


class Repeat(Method):
    """Run a part of a recipe a number of times over.

    times: how often it is run, 1 or more
    part: the recipe that is repeated, of one phase or several
    """

    times: int
    part: Any

    def check(self) -> None:
        """At least once."""
        if self.times < 1:
            raise UserError(f"repeat: times must be 1 or more, not {self.times}")

    def expand(self) -> Any:
        """The part, one after the other."""
        from smallbert.recipes.recipe import Recipe

        whole = Recipe("")
        for _ in range(self.times):
            whole = whole | self.part
        return whole
