"""A space to search is a recipe with choices in it: sets and maybe(), as everywhere, and ranges.

    finetune(lr=log(1e-6, 1e-4), epochs={1, 2, 3}, dropout=linear(0, 0.3)) | maybe(quantize(8))

In log(low, high) every factor is as likely as any other, in linear(low, high) every distance; ends written as whole
numbers give whole numbers where the setting takes any. Drawn numbers are rounded to three digits, so that a
recipe is what its record says. The default of a set is its first value, of maybe() to go without, and of a range the
setting's own default if that lies inside, else the middle.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any, NamedTuple, get_args, get_type_hints

from smallbert.errors import UserError
from smallbert.methods import METHODS, RANGES
from smallbert.recipes.recipe import Recipe, read_tree
from smallbert.recipes.space import count_recipes, every_choice
from smallbert.recipes.syntax import error_at, operands, syntax_tree

ONE_OF, WITHOUT, WITH = "one of", "without", "with"
DIGITS = 3
SEEDS = ("seed", "seeds")
TWO_ENDS = "a range needs two ends, such as {}(0.1, 0.5)"
NO_SEED = (
    "a seed cannot be searched: the best of many seeds is luck, which does not carry over to other data (BERT-Vision "
    "searched seeds on the very dev set it then reported); give several to --seeds, and the result is a mean over them"
)


class Choice(NamedTuple):
    """One thing to choose: a value of some, or a number of a range."""

    name: str  # such as finetune.lr
    kind: str  # one of, linear, log
    values: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    whole: bool = False
    default: Any = None

    @property
    def words(self) -> str:
        """All of it in words: "1e-06 to 0.0001"."""
        return ", ".join(self.values) if self.values else f"{self.low:g} to {self.high:g}"

    @property
    def ends(self) -> tuple[Any, ...]:
        """What is farthest apart in it."""
        return self.values or (self.low, self.high)

    def rounded(self, value: Any) -> Any:
        """A drawn value as it stands in the recipe."""
        if self.values or self.whole:
            return value
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


Choose = Callable[[Choice], Any]


@dataclass
class Space:
    """A space as read: its choices by the place where they stand, and what each value stands for."""

    text: str
    tree: ast.AST
    choices: dict[tuple[int, ...], Choice] = field(default_factory=dict)
    options: dict[str, Mapping[str, ast.AST]] = field(default_factory=dict)

    def draw(self, choose: Choose) -> Recipe:
        """The recipe that comes of asking `choose` for every choice that is met."""
        return read_tree(_Draw(self, choose).visit(copy.deepcopy(self.tree)), self.text)

    def default(self) -> Recipe:
        """The recipe of all defaults."""
        return self.draw(lambda choice: choice.default)

    def defaults(self) -> dict[str, Any]:
        """The defaults that are met on the way to the default recipe, by name."""
        met: dict[str, Any] = {}
        self.draw(lambda choice: met.setdefault(choice.name, choice.default))
        return met

    def count(self) -> int | None:
        """How many recipes there are, equal ones included; None where there is no end of them."""
        return None if _has_range(self.tree) else count_recipes(self.tree, self.text)

    def ends(self) -> list[Recipe]:
        """The default recipe, and those with one choice at each of its ends."""
        drawn = [
            self.draw(lambda choice, one=one, end=end: end if choice is one else choice.default)  # type: ignore[misc]
            for one in self.choices.values()
            for end in one.ends
        ]
        return [self.default(), *drawn]

    def beginnings(self, most: int) -> list[Recipe]:
        """Every recipe that the first phases can stand for, as far as those are few: what trials have in common."""
        parts, found = list(operands(self.tree, ast.BitOr)), []
        for end in range(1, len(parts)):
            start = reduce(lambda left, right: ast.BinOp(left, ast.BitOr(), right), parts[:end])  # type: ignore[arg-type]
            if _has_range(start) or count_recipes(start, self.text) > most:
                break
            found += [read_tree(tree, self.text) for tree in every_choice(start)]
        return found


def read_space(text: str) -> Space:
    """Read a space and check every recipe at its ends; one in which there is nothing to choose is refused."""
    tree = syntax_tree(text)
    if tree is None:
        raise UserError("there is no recipe to search; write --recipe 'finetune(lr=log(1e-6, 1e-4), epochs={1, 2, 3})'")
    space = Space(text, tree)
    _find(space, tree, "", "", False)
    space.default()  # which names what is wrong with a recipe, an unknown range among it
    if not space.choices:
        raise UserError(
            f"there is nothing to search in '{text}'; write a range such as lr=log(1e-6, 1e-4), or a set such as "
            "epochs={1, 2, 3}"
        )
    space.ends()
    return space


def _find(space: Space, node: ast.AST, method: str, setting: str, chosen: bool) -> None:
    """Note every choice at and below a node; `chosen`, it stands inside one itself."""
    match node:
        case ast.Set(elts=items):
            _no_seed(setting, node, space.text)
            texts = {ast.unparse(item): item for item in items}
            _add(space, node, method, setting, Choice("", ONE_OF, tuple(texts), default=next(iter(texts))), texts)
            for item in texts.values():
                _find(space, item, method, setting, True)
        case ast.Call(func=ast.Name(id="maybe"), args=[inner], keywords=[]):
            options = {WITHOUT: ast.copy_location(ast.Name("identity", ast.Load()), node), WITH: inner}
            name = f"maybe {ast.unparse(inner)}"
            _add(space, node, name, "", Choice("", ONE_OF, (WITHOUT, WITH), default=WITHOUT), options)
            _find(space, inner, method, setting, True)
        case ast.Name(id="maybe") | ast.Call(func=ast.Name(id="maybe")):
            raise error_at("maybe takes one recipe, such as maybe(quantize(8))", node, space.text)
        case ast.Name(id=word) if word in RANGES:
            raise error_at(TWO_ENDS.format(word), node, space.text)
        case ast.Call(func=ast.Name(id=word)) if word in RANGES:
            _no_seed(setting, node, space.text)
            _add(space, node, method, setting, _range(node, word, method, setting, space.text))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            known = [each.name for each in fields(METHODS[name])] if name in METHODS else []  # type: ignore[arg-type]
            places = [*known, *[""] * len(args)]
            for place, value in [*zip(places, args, strict=False), *((one.arg or "", one.value) for one in keywords)]:
                if chosen:
                    _no_seed(place, node, space.text)
                _find(space, value, name, place, chosen)
        case _:
            for child in ast.iter_child_nodes(node):
                _find(space, child, method, setting, chosen)


def _add(
    space: Space,
    node: ast.AST,
    method: str,
    setting: str,
    choice: Choice,
    options: Mapping[str, ast.AST] | None = None,
) -> None:
    """Hold a choice under a name of its own: finetune.lr, and the second one of that name as finetune.lr #2."""
    name = f"{method}.{setting}" if setting else method or "methods"
    taken = [one.name.split(" #")[0] for one in space.choices.values()].count(name)
    name = f"{name} #{taken + 1}" if taken else name
    space.choices[_place(node)] = choice._replace(name=name)
    space.options[name] = options or {}


def _range(node: ast.Call, kind: str, method: str, setting: str, text: str) -> Choice:
    ends = [] if node.keywords else [_number(arg) for arg in node.args]
    if len(ends) != 2 or None in ends:
        raise error_at(TWO_ENDS.format(kind), node, text)
    low, high = ends
    assert low is not None and high is not None
    if not low < high or (kind == "log" and low <= 0):
        what = f"the ends of a range are two numbers{' above 0' if kind == 'log' else ''}, the lower one first"
        raise error_at(f"{what}: {kind}(low, high)", node, text)
    hint = get_type_hints(METHODS[method]).get(setting) if method in METHODS else None
    takes = (hint, *get_args(hint))
    whole = all(isinstance(end, int) for end in ends) and (int in takes or float not in takes)
    return Choice("", kind, (), low, high, whole, _middle(kind, low, high, whole, method, setting))


def _middle(kind: str, low: float, high: float, whole: bool, method: str, setting: str) -> Any:
    """The setting's own default where it lies in the range, else the middle."""
    known = {each.name: each.default for each in fields(METHODS[method])} if method in METHODS else {}  # type: ignore[arg-type]
    usual = known.get(setting)
    if isinstance(usual, int | float) and not isinstance(usual, bool) and low <= usual <= high:
        return usual
    middle = math.sqrt(low * high) if kind == "log" else (low + high) / 2
    return round(middle) if whole else float(f"{middle:.{DIGITS}g}")


def _number(node: ast.AST) -> float | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, SyntaxError):
        return None
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _no_seed(setting: str, node: ast.AST, text: str) -> None:
    if setting in SEEDS:
        raise error_at(NO_SEED, node, text)


def _has_range(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Call) and getattr(one.func, "id", "") in RANGES for one in ast.walk(node))


def _place(node: Any) -> tuple[int, ...]:
    """Where in the text a part stands; two choices never fill the same place."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


class _Draw(ast.NodeTransformer):
    """Puts one value in the place of every choice."""

    def __init__(self, space: Space, choose: Choose) -> None:
        self.space, self.choose = space, choose

    def visit(self, node: ast.AST) -> Any:
        choice = self.space.choices.get(_place(node)) if isinstance(node, ast.Set | ast.Call) else None
        if choice is None:
            return self.generic_visit(node)
        value = self.choose(choice)
        if not choice.values:
            return ast.copy_location(ast.Constant(value), node)
        return self.visit(copy.deepcopy(self.space.options[choice.name][value]))


def rows(space: Space) -> Iterator[list[str]]:
    """Each choice as name, kind, range and default, for tables."""
    for choice in space.choices.values():
        kind = f"whole {choice.kind}" if choice.whole else choice.kind
        default = choice.default if choice.values else f"{choice.default:g}"
        yield [choice.name, kind, choice.words, str(default)]
