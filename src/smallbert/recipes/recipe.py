"""A Recipe says which methods to apply, as text and as Python, the same expression in both.

    finetune(epochs=3) | drop_layers(6) | distill | quantize(8)        `|`  then
    mix_layers | movement(0.1) + distill + train(epochs=6)             `+`  in the same training phase

Text is parsed with `ast`, names and literals only, and never evaluated.
"""

import ast
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, overload

from smallbert.errors import UserError
from smallbert.methods import METHODS, RANGES, RESERVED, Method
from smallbert.presets import PRESETS
from smallbert.recipes.combining import Combines
from smallbert.recipes.registry import suggest
from smallbert.recipes.syntax import SYNTAX, RecipeError, constant, dashed, error_at, operands, pointing, syntax_tree

Part = TypeVar("Part", bound=Combines)
DEPTH_LIMIT = 20  # of methods that stand for methods that stand for methods …
PHASE_LIMIT = 10_000


class _Parts(Combines, Sequence[Part], Generic[Part]):
    """An immutable sequence that is equal to another where both print the same."""

    __slots__ = ("_parts",)
    _parts: tuple[Part, ...]
    _joint: ClassVar[str]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} cannot be changed; make a new one")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._parts,)

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Part, ...]: ...
    def __getitem__(self, index: int | slice) -> Part | tuple[Part, ...]:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return self._joint.join(map(str, self._parts)) or "identity"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def key(self) -> str:
        """The canonical text: every setting that says what is made, so that the same key means the same work."""
        return self._joint.join(part.key() for part in self._parts) or "identity"

    def brief(self) -> str:
        """Every part without the settings that are as they would be unsaid.

        >>> Recipe("drop_layers(6, which='even') | train(epochs=3.0, batch=64)").brief()
        'drop_layers(6) | train(batch=64)'
        """
        return self._joint.join(part.brief() for part in self._parts) or "identity"


ONE_A_PHASE = {
    "prunes": ("method that decides which weights are kept", "prune twice"),
    "is_train_setting": ("training setting", "train twice"),
    "pools": ("pooler", "put the second in place of the first"),
}


class Phase(_Parts[Method]):
    """Methods that share one training loop, in the order of their stage, however they were typed."""

    _joint = " + "

    def __init__(self, methods: Iterable[Method] = ()) -> None:
        ordered = sorted(methods, key=lambda method: (method.is_train_setting, method.stage, str(method)))
        object.__setattr__(self, "_parts", tuple(ordered))
        for role, (what, again) in ONE_A_PHASE.items():
            if len(given := [method for method in ordered if getattr(method, role)]) > 1:
                names = [method.name for method in given]
                told = " and ".join(names if len({*names}) > 1 else map(str, given))
                raise UserError(
                    f"a phase has one {what}, but {told} were given; keep one, or put | between them to {again}"
                )

    @property
    def train_setting(self) -> Method | None:
        """The method that sets epochs, lr and so on, if the phase has one."""
        return next((method for method in self if method.is_train_setting), None)

    @property
    def trains(self) -> bool:
        """Whether the phase runs the training loop."""
        return any(method.trains or method.is_train_setting for method in self)


class Recipe(_Parts[Phase]):
    """A sequence of phases; made from text, from methods, or from several of either.

    >>> Recipe("drop_layers(6) | distill") == drop_layers(6) | distill
    True
    """

    _joint = " | "

    def __init__(self, source: Any = "") -> None:
        object.__setattr__(self, "_parts", tuple(phase for phase in _phases_of(source) if phase))

    def phases(self) -> list[Phase]:
        """The phases ready to run, with every method that stands for other methods replaced by them."""
        ready: list[Phase] = []
        waiting = [(phase, 0) for phase in reversed(self)]
        while waiting:
            phase, depth = waiting.pop()
            expansions = [method.expand() for method in phase]
            if all(recipe is None for recipe in expansions):
                ready.append(phase)
            elif depth == DEPTH_LIMIT:
                raise UserError(f"'{phase}' expands into methods that expand again, more than {depth} levels deep")
            else:
                waiting += [(step, depth + 1) for step in reversed(_merged(phase, expansions))]
            if len(ready) + len(waiting) > PHASE_LIMIT:
                raise UserError(f"the recipe has more than {PHASE_LIMIT} phases once written out; repeat less")
        return ready


Usable = Recipe | Phase | Method | type[Method] | str  # what a recipe is made of


def then(left: Any, right: Any) -> Recipe:
    """One after the other, as `left | right`."""
    return Recipe([left, right])


def together(left: Any, right: Any) -> Phase:
    """Both in the same training phase, as `left + right`."""
    methods: list[Method] = []
    for recipe in (Recipe(left), Recipe(right)):
        if len(recipe) > 1:
            raise UserError(f"+ joins methods of one phase, but '{recipe}' has {len(recipe)} phases; use | there")
        methods += [method for phase in recipe for method in phase]
    return Phase(methods)


def _phases_of(source: Any) -> Iterable[Phase]:
    """The phases that anything usable as a recipe holds."""
    if isinstance(source, str):
        return _read_text(source)
    if isinstance(source, Method):
        return [Phase([source])]
    if isinstance(source, type) and issubclass(source, Method):
        return [Phase([source()])]
    if isinstance(source, Phase):
        return [source]
    if isinstance(source, Recipe):
        return source
    if isinstance(source, list | tuple):
        return [phase for part in source for phase in _phases_of(part)]
    raise UserError(f"{source!r} ({type(source).__name__}) is not a recipe; {SYNTAX}")


def _merged(phase: Phase, expansions: list[Recipe | None]) -> Sequence[Phase]:
    """The phases that stand in for one phase, given what each of its methods stands for (None: for itself)."""
    parts = [Recipe(method if recipe is None else recipe) for method, recipe in zip(phase, expansions, strict=True)]
    if len(parts) == 1:
        return parts[0]
    for method, part in zip(phase, parts, strict=True):
        if len(part) != 1:
            inside = f", or put the others into {method.name}(part=...)" if hasattr(method, "part") else ""
            raise UserError(
                f"{method.name} expands into {len(part)} phases, not one, so + cannot join it; use |{inside}"
            )
    return [Phase(method for part in parts for method in part[0])]


# Reading text; every error shows the text with a caret under the place it speaks of, see syntax.py.


def read_tree(node: ast.AST | None, text: str) -> Recipe:
    """The recipe that a parsed expression stands for; `text` is what it was parsed from."""
    match node:
        case None:
            return Recipe([])
        case ast.BinOp(op=ast.BitOr()):
            return Recipe([read_tree(operand, text) for operand in operands(node, ast.BitOr)])
        case ast.BinOp(op=ast.Add()):
            phase = Phase()
            for operand in operands(node, ast.Add):
                part = read_tree(operand, text)
                with pointing(operand, text):
                    phase = together(phase, part)
            return Recipe(phase)
        case ast.BinOp(op=ast.Sub()):
            if (name := dashed(node)) in PRESETS:
                return Recipe(PRESETS[name].recipe)
            raise error_at(f"- cannot join methods, and a name is written with _ instead; {SYNTAX}", node, text)
        case ast.Name(id=name):
            return _called(name, node, [], [], text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _called(name, node, args, keywords, text)
        case ast.Set():
            raise _space(node, text)
    raise error_at(f"this is not a method; {SYNTAX}", node, text)


def _read_text(text: str) -> Recipe:
    try:
        return read_tree(syntax_tree(text), text)
    except RecursionError:
        raise RecipeError(f"this recipe is nested too deeply; {SYNTAX}") from None


def _called(name: str, node: ast.AST, args: list[ast.expr], keywords: list[ast.keyword], text: str) -> Recipe:
    if name == "maybe":
        raise _space(node, text)
    if name in RANGES:
        what = "only smallbert tune can search a range; elsewhere write one value or a set"
        raise error_at(what, node, text)
    if name == "identity" or (name not in METHODS and name in PRESETS):
        if args or keywords:
            raise error_at(f"{name} has no settings", node, text)
        return Recipe(PRESETS[name].recipe) if name in PRESETS else Recipe([])
    if name not in METHODS:
        raise _unknown(name, node.func if isinstance(node, ast.Call) else node, text)
    settings: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg is None or keyword.arg in settings:
            what = "** cannot be used in a recipe" if keyword.arg is None else f"{keyword.arg!r} is given twice"
            raise error_at(f"{what}; write each setting once, as name=value", keyword, text)
        settings[keyword.arg] = _value(keyword.value, text)
    values = [_value(arg, text) for arg in args]
    with pointing(node, text):
        return Recipe(METHODS[name](*values, **settings))


def _value(node: ast.AST | None, text: str) -> Any:
    """A setting's value: a plain literal, or a recipe."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            if not isinstance(value, bool):
                return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, text) for item in items]
        case ast.Dict(keys=keys, values=items) if all(type(constant(key)) in (str, int) for key in keys):
            found = [constant(key) for key in keys]
            if len({str(key) for key in found}) < len(found):
                raise error_at("a key is in this dict twice; write pairs as a list, [[1, 2], [1, 3]]", node, text)
            return {key: _value(item, text) for key, item in zip(found, items, strict=True)}
        case ast.Name(id=name) if not any(name in names for names in (METHODS, PRESETS, RESERVED)):
            raise _unknown(name, node, text, f" If it is text, write it in quotes: {name!r}.")
        case ast.Name() | ast.Call() | ast.BinOp(op=ast.BitOr() | ast.Add() | ast.Sub()):
            return read_tree(node, text)
        case ast.Set():
            raise _space(node, text)
    raise error_at("a setting is a number, a text in quotes, True, False, None, a list, a dict or a recipe", node, text)


def _unknown(name: str, node: ast.AST, text: str, hint: str = "") -> RecipeError:
    names = [*METHODS, *PRESETS]
    what = f"no method or preset is called {name!r}.{hint}{suggest(name, names)}"
    return error_at(what, node, text)


def _space(node: ast.AST, text: str) -> RecipeError:
    what = "sets and maybe() make a space of many recipes, where one recipe is needed; write one value here, or give"
    return error_at(f"{what} the whole text to `smallbert compare`, which tries each", node, text)
