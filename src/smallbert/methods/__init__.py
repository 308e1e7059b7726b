"""A Method is one technique: one file in this folder, one small class, plain settings, and the hooks it needs.

    class DropLayers(Method):
        "Keep some layers and drop the rest."

        keep: int = 6

        def plan(self, encoder, task): ...

Defining the class is all: it becomes a frozen dataclass, is called `drop_layers`, and lists itself in METHODS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from smallbert.errors import UserError
from smallbert.recipes.combining import Combines
from smallbert.recipes.registry import Registry, did_you_mean
from smallbert.recipes.settings import (
    accept,
    describe,
    fields_of,
    hints_of,
    is_required,
    shown,
    to_brief,
    to_key,
    to_text,
    words_of,
)

if TYPE_CHECKING:
    from smallbert.recipes.recipe import Recipe

METHODS: Registry[type[Method]] = Registry("method", package=__name__)
RANGES = ("linear", "log")  # words for all values between two, which only tuning can search
RESERVED = ("identity", "maybe", *RANGES)  # words of the recipe language


@dataclass_transform(frozen_default=True, eq_default=False)
class Method(Combines):
    """One technique with its settings; a subclass overrides the hooks it needs (in the order they are called)."""

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    stage: ClassVar[int] = 50  # order inside `+`, lower first: mixout and delta 10, mask 30, quantise 50
    trains: ClassVar[bool] = False  # a phase that holds it runs the training loop
    prunes: ClassVar[bool] = False  # it decides which weights stay; a phase has at most one
    pools: ClassVar[bool] = False  # it makes a head that reads all layers; a phase has at most one
    places: ClassVar[tuple[str, ...]] = ()  # settings that say where something is kept, and not what is made
    teaches: ClassVar[bool] = False  # its loss tells what an example should give, so that it needs no label
    guesses: ClassVar[bool] = False  # what is scored are hidden words, and not the task's answers
    is_train_setting: ClassVar[bool] = False  # it sets epochs, lr, ... of its phase; a phase has at most one

    def __init_subclass__(cls, shared: bool = False) -> None:
        super().__init_subclass__()
        cls.about = " ".join((cls.__dict__.get("__doc__") or "").split("\n\n")[0].split())
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()
        dataclass(frozen=True, init=False, eq=False, repr=False)(cls)
        if taken := sorted({field.name for field in fields_of(cls)} & set(dir(Method))):
            raise TypeError(f"{cls.__name__}: a setting cannot be called {taken[0]!r}, which every method already has")
        if cls.name in RESERVED:
            raise TypeError(f"{cls.__name__}: {cls.name!r} is a reserved word of recipes")
        if not shared and not cls.__name__.startswith("_"):  # a base of several techniques is none of its own
            METHODS.add(cls.name, cls)

    def __init__(self, *values: Any, **settings: Any) -> None:
        """Take settings by place or by name, as a call in a recipe does, and check each."""
        names = [field.name for field in fields_of(type(self))]
        if len(values) > len(names):
            raise UserError(f"{self.name} was given {len(values)} settings, but its settings are: {self.options()}")
        for name in settings:
            if name not in names:
                hint = did_you_mean(name, names)
                raise UserError(f"{self.name} has no setting {name!r}.{hint} Its settings are: {self.options()}")
            if name in names[: len(values)]:
                raise UserError(f"{self.name} was given {name!r} twice, by position and by name; write it once")
        given = dict(zip(names, values, strict=False)) | settings
        for field in fields_of(type(self)):
            value = given[field.name] if field.name in given else self._default(field)
            object.__setattr__(self, field.name, self._checked(field.name, value))
        self.check()

    def __call__(self, *values: Any, **settings: Any) -> Method:
        """Another instance of the same technique: `drop_layers(6)` where drop_layers is the ready-made one."""
        return type(self)(*values, **settings)

    def __str__(self) -> str:
        return self._called_with({field.name: to_text(getattr(self, field.name)) for field in fields_of(type(self))})

    __repr__ = __str__

    def key(self) -> str:
        """Itself, with settings that only say where things are kept as they would be unsaid."""
        usual = {field.name: self._default(field) for field in fields_of(type(self)) if field.name in self.places}
        values = {field.name: getattr(self, field.name) for field in fields_of(type(self))} | usual
        return self._called_with({name: to_key(value) for name, value in values.items()})

    def _called_with(self, told: dict[str, str]) -> str:
        settings = ", ".join(f"{name}={text}" for name, text in told.items())
        return f"{self.name}({settings})" if settings else self.name

    def brief(self) -> str:
        """Itself without the settings that are as they would be unsaid; the first without its name."""
        told = [
            ("" if place == 0 else f"{field.name}=") + to_brief(getattr(self, field.name))
            for place, field in enumerate(fields_of(type(self)))
            if not self._is_usual(field)
        ]
        return f"{self.name}({', '.join(told)})" if told else self.name

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def settings(self) -> dict[str, Any]:
        """Every setting as plain JSON, defaults included; a recipe among them as its text."""
        values = {field.name: getattr(self, field.name) for field in fields_of(type(self))}
        return {name: str(value) if isinstance(value, Combines) else value for name, value in values.items()}

    @classmethod
    def options(cls) -> str:
        """The settings there are, each with its default, such as "keep=6, which='even'"."""
        texts = [
            field.name + ("" if is_required(field) else f"={to_text(cls._default(field))}") for field in fields_of(cls)
        ]
        return ", ".join(texts) or "none"

    @classmethod
    def is_ready(cls) -> bool:
        """Whether it can be used without saying any setting."""
        return not any(is_required(field) for field in fields_of(cls))

    @classmethod
    def _default(cls, field: Field[Any]) -> Any:
        if is_required(field):
            raise UserError(f"{cls.name} needs {field.name!r}; its settings are: {cls.options()}")
        return field.default if field.default_factory is MISSING else field.default_factory()

    def _is_usual(self, field: Field[Any]) -> bool:
        """Whether a setting is as it would be unsaid."""
        if is_required(field):
            return False
        return to_text(getattr(self, field.name)) == to_text(self._checked(field.name, self._default(field)))

    def _checked(self, name: str, value: Any) -> Any:
        own: Any = type(self)
        hint = hints_of(own)[name]
        try:
            accepted = accept(value, hint)
            if name == "lr" and accepted is not None and accepted <= 0:
                raise UserError(f"{self.name}: lr, a learning rate, must be more than 0, not {accepted}")
            return accepted
        except TypeError:
            near = did_you_mean(value, words_of(hint)) if isinstance(value, str) else ""
            given = f"{shown(value)} ({type(value).__name__})"
            wanted = "a finite number" if isinstance(value, float) and not math.isfinite(value) else describe(hint)
            raise UserError(f"{self.name}: {name} must be {wanted}, but {given} was given.{near}") from None

    # The hooks, in the order a phase calls them. Types are left open here so that this file stays light.

    def check(self) -> None:
        """Refuse, by a UserError, settings whose values cannot work."""

    def expand(self) -> Recipe | None:
        """The recipe this stands for, where it is made of other methods."""
        return None

    def reads(self, marks: Collection[str] = ()) -> str:
        """A fingerprint of the files it reads, if any: work on others is other work, whatever their names.

        A name among the marks is no folder.
        """
        return ""

    def fits(self, phase: Any, steps: int | None) -> None:
        """Refuse, by a UserError, a phase of so many steps (None: not known yet; 0: one that does not train).

        Asked twice: before anything is trained, of a phase that has shapes and marks, but no weights and no stream
        (then a mark that is not known is None); and again when the phase begins.
        """

    def data(self, phase: Any) -> Any:
        """Another stream of data for the phase than the task's own."""
        return None

    def rows(self, phase: Any, rows: Any) -> Any:
        """The task's training rows for this phase, from those so far: more, fewer, or the same; a label may be None."""
        return rows

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Look at the encoder and the data and decide; plain JSON."""
        return {}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Change shapes only: no data, no values, no randomness, since every load does it again."""

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Set values once, after build, from the encoder as it was `before`; never done again on load."""

    def attach(self, phase: Any) -> None:
        """Add what exists only while training."""

    def weights(self, phase: Any) -> dict[str, Any]:
        """The weight (a number or a Schedule) of each loss term, "task" included."""
        return {}

    def depth(self, phase: Any) -> int | None:
        """How many layers its loss reads at this step; None: all of them, or what a head makes of them."""
        return 0 if type(self).loss is Method.loss else None

    def loss(self, step: Any) -> dict[str, Any]:
        """Extra loss terms by name."""
        return {}

    def after_backward(self, phase: Any) -> None:
        """Read or change gradients before the optimiser steps."""

    def after_step(self, phase: Any) -> None:
        """Correct weights after the optimiser stepped."""

    def every(self) -> int:
        """How many steps lie between two calls of look; 0 for never."""
        return 0

    def look(self, phase: Any) -> None:
        """Take stock every so many steps."""

    def around_step(self) -> Callable[..., Any] | None:
        """A function that wraps the whole step; one method of a phase may have one."""
        return None

    def settle(self, phase: Any) -> None:
        """Fold what was learned into plain weights."""

    def take_over(self, phase: Any) -> None:
        """What is left to do where a finished phase of an earlier run is taken over instead of run."""
