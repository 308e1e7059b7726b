"""Settings of methods: which values their annotations accept, and how these are written."""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from smallbert.recipes.combining import Combines

JSON = bool | int | float | str | list | dict | None


def fields_of(method: Any) -> tuple[Field[Any], ...]:
    """The settings of a method's class."""
    return fields(method)


@cache
def hints_of(method: Any) -> dict[str, Any]:
    """What each setting may be, by name."""
    return get_type_hints(method)


def meanings_of(method: Any) -> dict[str, str]:
    """What each setting means, as the docstrings of the class and of those it is made of say: `name: meaning`.

    {"alpha": "weight of the teacher's term; the labels have the rest", …}
    """
    told: dict[str, str] = {}
    for one in reversed(method.__mro__):
        lines = re.findall(r"^(\w+): (.+(?:\n +.+)*)", inspect.cleandoc(one.__dict__.get("__doc__") or ""), re.M)
        told |= {name: " ".join(text.split()) for name, text in lines}
    return {field.name: told.get(field.name, "") for field in fields_of(method)}


def is_required(field: Field[Any]) -> bool:
    """Whether a setting has to be said."""
    return field.default is MISSING and field.default_factory is MISSING


def to_text(value: Any) -> str:
    """A value as a recipe has it."""
    return str(value) if isinstance(value, Combines) else repr(value)


def to_key(value: Any) -> str:
    """The same in the key of a recipe."""
    return value.key() if isinstance(value, Combines) else repr(value)


def to_brief(value: Any) -> str:
    """The same as people write it."""
    if isinstance(value, Combines):
        return value.brief()
    text = repr(value)  # a shell quotes double quotes more readably than single ones
    return text.replace("'", '"') if not {'"', "\\"} & {*text} else text


def shown(value: Any) -> str:
    """The beginning of it, for an error."""
    try:
        return to_text(value)[:200]
    except ValueError:  # Python refuses to print whole numbers of thousands of digits
        return "a very large number"


def accept(value: Any, hint: Any) -> Any:
    """The value as its annotation wants it (a whole number becomes a float), or a TypeError."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return accept(value, JSON if not isinstance(value, Combines) else Combines)
    if kind in (typing.Union, types.UnionType):
        for choice in sorted(inner, key=lambda choice: (get_origin(choice) or choice) is not type(value)):
            try:
                return accept(value, choice)
            except TypeError:
                continue
    elif kind is Literal:
        if any(type(value) is type(choice) and value == choice for choice in inner):
            return value
    elif kind is list and isinstance(value, list | tuple):
        return [accept(item, inner[0] if inner else JSON) for item in value]
    elif kind is dict and isinstance(value, dict):
        names = {str(key) if type(key) is int else key: item for key, item in value.items()}  # JSON knows names only
        return {accept(key, str): accept(item, inner[1] if inner else JSON) for key, item in names.items()}
    elif kind in (bool, type(None)):
        if type(value) is kind:
            return value
    elif kind is str and isinstance(value, str):
        return str.__str__(value)
    elif kind in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) < 2**63:  # larger ones are no setting, and cannot all be printed or made a float
            return kind(value)
    elif kind is float and isinstance(value, float):
        if math.isfinite(value):  # JSON and recipe text have no word for the others
            return float(value)
    elif isinstance(kind, type) and issubclass(kind, Combines):
        from smallbert.recipes.recipe import Recipe

        if isinstance(value, Combines | str) or (isinstance(value, type) and issubclass(value, Combines)):
            return Recipe(value)
    raise TypeError


def words_of(hint: Any) -> list[str]:
    """Every word that an annotation accepts, such as "first" and "last" of a Literal in a union."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return [choice for choice in inner if isinstance(choice, str)]
    is_union = get_origin(hint) in (typing.Union, types.UnionType)
    return [word for choice in inner for word in words_of(choice)] if is_union else []


def describe(hint: Any) -> str:
    """An annotation in words, such as "int or None"."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (typing.Union, types.UnionType, Literal):
        words = [repr(choice) if kind is Literal else describe(choice) for choice in inner]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    if isinstance(kind, type) and issubclass(kind, Combines):
        return "a recipe"
    name = "None" if kind is type(None) else getattr(kind, "__name__", str(kind))
    return f"{name} of {' to '.join(map(describe, inner))}" if inner else name
