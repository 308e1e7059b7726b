"""What recipes are made of joins by `|` and `+`, whatever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smallbert.recipes.recipe import Phase, Recipe


class Combines:
    """What can be joined by `|` (then) and `+` (in the same training phase): methods, phases and recipes."""

    def __or__(self, other: Any) -> Recipe:
        from smallbert.recipes.recipe import then

        return then(self, other)

    def __ror__(self, other: Any) -> Recipe:
        from smallbert.recipes.recipe import then

        return then(other, self)

    def __add__(self, other: Any) -> Phase:
        from smallbert.recipes.recipe import together

        return together(self, other)

    def __radd__(self, other: Any) -> Phase:
        from smallbert.recipes.recipe import together

        return together(other, self)

    def key(self) -> str:
        """Every setting that says what is made: the same key means the same work."""
        raise NotImplementedError

    def brief(self) -> str:
        """The same as people write it: without the settings that are as they would be unsaid."""
        raise NotImplementedError
