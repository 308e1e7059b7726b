"""The arms of a study: what is compared, under which names, and with which values of a setting that is varied."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple

from smallbert.errors import UserError
from smallbert.measuring.groups import short_recipes
from smallbert.methods import METHODS, Method
from smallbert.recipes.recipe import Phase, Recipe
from smallbert.recipes.space import expand_space


class Arm(NamedTuple):
    """One recipe of a study under its name; where a setting is varied, with one value of it."""

    name: str
    recipe: Recipe
    value: Any = None


def read_arms(recipes: str, names: str | None = None, vary: str | None = None) -> tuple[tuple[Arm, ...], str | None]:
    """The arms of a study, from recipes and names with ; between, and the name of the setting that is varied.

    >>> arms, setting = read_arms("finetune; mix_layers | finetune", "plain; mixture", "epochs=2,4")
    >>> [(arm.name, arm.value) for arm in arms]
    [('plain', 2), ('mixture', 2), ('plain', 4), ('mixture', 4)]
    """
    found = [recipe for text in recipes.split(";") if text.strip() for recipe in expand_space(text.strip())]
    if not found:
        raise UserError("there is nothing to study: write --recipes 'finetune; mix_layers | finetune'")
    called = _names(found, names)
    if vary is None:
        arms, setting = [Arm(name, recipe) for name, recipe in zip(called, found, strict=True)], None
    else:
        setting, values = read_vary(vary)
        pairs = list(zip(called, found, strict=True))
        arms = [Arm(name, with_setting(recipe, setting, value), value) for value in values for name, recipe in pairs]
    seen: dict[str, Arm] = {}
    for arm in arms:
        other = seen.setdefault(arm.recipe.key(), arm)
        if other is not arm:
            raise UserError(f"{_title(other)} and {_title(arm)} are the same recipe, {arm.recipe.key()}; give it once")
    return tuple(arms), setting


def _names(recipes: Sequence[Recipe], names: str | None) -> list[str]:
    if names is None:
        short = short_recipes([{"recipe": recipe.key()} for recipe in recipes])
        return [name if short.count(name) == 1 else f"{name} #{place}" for place, name in enumerate(short, 1)]
    called = [name.strip() for name in names.split(";")]
    if len(called) != len(recipes) or not all(called) or len(set(called)) < len(called):
        raise UserError(
            f"--names was given {names!r}; write {len(recipes)} different names with ; between, one for each recipe"
        )
    return called


def _title(arm: Arm) -> str:
    return f"{arm.name!r}" if arm.value is None else f"{arm.name!r} at {arm.value}"


def read_vary(text: str) -> tuple[str, list[Any]]:
    """A setting and its values.

    >>> read_vary("epochs=2,4")
    ('epochs', [2, 4])
    """
    name, _, values = text.partition("=")
    found = list(dict.fromkeys(_value(part.strip()) for part in values.split(",") if part.strip()))
    if not name.strip() or not found:
        raise UserError(f"--vary was given {text!r}; write a setting and its values, such as epochs=2,4,6")
    return name.strip(), found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word, such as local


def with_setting(recipe: Recipe, name: str, value: Any) -> Recipe:
    """The recipe with one setting replaced in the last phase that has it; `name` may be method.setting.

    >>> str(with_setting(Recipe("finetune | movement + train"), "epochs", 8))     # that of train, not of finetune
    """
    wanted, _, setting = name.rpartition(".")
    phases = [_with_training(phase) for phase in recipe]
    for place, phase in reversed(list(enumerate(phases))):
        own = [m for m in phase if setting in m.settings() and wanted in ("", m.name)]
        if len(own) > 1:
            choices = " or ".join(f"{method.name}.{setting}" for method in own)
            raise UserError(f"{' and '.join(m.name for m in own)} both have a setting {setting!r}; write {choices}")
        if own:
            changed = own[0](**{**own[0].settings(), setting: value})
            phases[place] = Phase([changed if method is own[0] else method for method in phase])
            return Recipe([*recipe[:place], phases[place], *recipe[place + 1 :]])
    there = {f"{method.name}.{each}": None for phase in phases for method in phase for each in method.settings()}
    raise UserError(f"--vary {name}: no method of '{recipe}' has this setting; it has {', '.join(there) or 'none'}")


def _with_training(phase: Phase) -> Phase:
    """The phase with the training setting that it would get by default."""
    if phase.train_setting is not None or not phase.trains:
        return phase
    default: Method = METHODS["train"]()
    return Phase([*phase, default])
