"""A search space is a recipe with choices in it: a set means "try each", maybe(x) means "without and with".

    drop_layers({3, 6}) | distill(alpha={0.5, 0.9}) | maybe(quantize(8))

holds eight recipes.
"""

import ast
import copy
from itertools import product
from math import prod
from typing import Any

from smallbert.errors import UserError
from smallbert.recipes.recipe import Recipe, read_tree
from smallbert.recipes.syntax import error_at, syntax_tree


def expand_space(text: str, limit: int = 1000) -> list[Recipe]:
    """Every recipe of a space, in the order written and each once; a plain recipe is a space of one.

    >>> [str(recipe) for recipe in expand_space("drop_layers({3, 6})")]
    ["drop_layers(keep=3, which='even')", "drop_layers(keep=6, which='even')"]
    """
    try:
        tree = syntax_tree(text)
        if tree is None:
            return [Recipe()]
        if (count := count_recipes(tree, text)) > limit:
            raise UserError(f"this space holds {count:,} recipes, more than the limit of {limit:,}; offer fewer values")
        return list(dict.fromkeys(read_tree(choice, text) for choice in every_choice(tree)))
    except RecursionError:
        raise UserError("this space is nested too deeply; write it as several smaller ones") from None


def count_recipes(node: ast.AST, text: str) -> int:
    """How many recipes there are, equal ones included, found without making them."""
    match node:
        case ast.Set(elts=items):
            return sum(count_recipes(item, text) for item in items)
        case ast.Call(func=ast.Name(id="maybe"), args=[inner], keywords=[]):
            return 1 + count_recipes(inner, text)
        case ast.Name(id="maybe") | ast.Call(func=ast.Name(id="maybe")):
            raise error_at("maybe takes one recipe, such as maybe(quantize(8))", node, text)
    return prod(count_recipes(child, text) for child in ast.iter_child_nodes(node))


def every_choice(node: Any) -> list[Any]:
    """Every tree without sets and maybe() that this one stands for; places in the text stay, for errors to point at."""
    match node:
        case ast.Set(elts=items):
            return [choice for item in items for choice in every_choice(item)]
        case ast.Call(func=ast.Name(id="maybe"), args=[inner]):
            return [ast.copy_location(ast.Name("identity", ast.Load()), node), *every_choice(inner)]
        case list():
            return [list(choice) for choice in product(*map(every_choice, node))]
        case ast.AST():
            names, values = zip(*ast.iter_fields(node), strict=True) if node._fields else ((), ())
            return [_with(node, names, choice) for choice in product(*map(every_choice, values))]
    return [node]


def _with(node: ast.AST, names: tuple[str, ...], values: tuple[Any, ...]) -> ast.AST:
    changed = copy.copy(node)
    for name, value in zip(names, values, strict=True):
        setattr(changed, name, value)
    return changed
