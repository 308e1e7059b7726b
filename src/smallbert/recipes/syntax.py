"""Recipe text as a tree of Python's own grammar, and errors that show the text with carets under a place of it."""

import ast
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from smallbert.errors import UserError

SYNTAX = "a recipe is methods joined by | (then) and + (together), such as 'drop_layers(6) | distill + train(epochs=3)'"


class RecipeError(UserError):
    """A recipe text that cannot be read; the message shows the text with a caret under the place."""


def syntax_tree(text: str) -> ast.expr | None:
    """Parse a recipe text into one expression, or None where the text is empty."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a bad escape in a string is only a warning to Python
            # Inside a call, a recipe may run over several lines, and nothing but one argument gets through.
            tree = ast.parse(f"_(\n{text}\n)", mode="eval").body
    except SyntaxError as error:
        what = f"cannot read this recipe ({error.msg.split('.')[0]}); {SYNTAX}"  # Python's own hints mislead here
        place = (error.lineno or 0, (error.offset or 1) - 1, error.end_lineno, (error.end_offset or 1) - 1)
        raise RecipeError(_pointed(what, text, *place)) from None
    except (ValueError, RecursionError, MemoryError):
        raise RecipeError(f"this recipe is too long, nested too deeply or holds a broken character; {SYNTAX}") from None
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords):
        raise RecipeError(_pointed(f"cannot read this recipe; {SYNTAX}", text))
    if len(tree.args) > 1:
        raise error_at("a comma cannot join methods; write | (then) or + (together)", tree.args[1], text)
    return tree.args[0] if tree.args else None


def dashed(node: ast.expr) -> str:
    """A preset's name as tables spell it, half-int8, which Python reads as a difference; "" where it is none."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.BinOp(left=left, op=ast.Sub(), right=ast.Name(id=name)) if before := dashed(left):
            return f"{before}-{name}"
    return ""


def constant(node: ast.AST | None) -> Any:
    """A plain name or number, one below zero included."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if not isinstance(value, bool):
            return -value
        case ast.Constant(value=value):
            return value
    return None


def operands(node: ast.AST, operator: type[ast.operator]) -> Iterator[ast.AST]:
    """What a chain such as `a | b | c` joins; read in a loop, since a long chain is a deep tree."""
    found = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        found.append(node.right)
        node = node.left
    return reversed([*found, node])


@contextmanager
def pointing(node: ast.AST, text: str) -> Iterator[None]:
    """Show where in the text an error comes from, unless it already says so."""
    try:
        yield
    except RecipeError:
        raise
    except UserError as error:
        raise error_at(str(error), node, text) from None


def error_at(what: str, node: Any, text: str) -> RecipeError:
    """An error about one part of a recipe text, with carets under it."""
    lines = [line.encode() for line in _lines(text)]  # ast counts bytes, a caret counts characters
    start = len(lines[node.lineno - 2][: node.col_offset].decode())
    end = len(lines[node.end_lineno - 2][: node.end_col_offset].decode())
    return RecipeError(_pointed(what, text, node.lineno, start, node.end_lineno, end))


def _pointed(what: str, text: str, line: int = 2, start: int = 0, end_line: int | None = None, end: int = 0) -> str:
    """The sentence, then the line it speaks of, then carets; the text's first line is line 2 (see syntax_tree)."""
    lines = _lines(text)
    if not 2 <= line < 2 + len(lines):  # Python noticed only behind the end, where the call we put around it closes
        line, start, end_line = len(lines) + 1, len(lines[-1]), None
    shown = lines[line - 2].replace("\t", " ")
    width = (end if end_line == line else len(shown)) - start
    return f"{what}\n  {shown}\n  {' ' * start}{'^' * max(1, width)}"


def _lines(text: str) -> list[str]:
    """The lines as Python counts them; str.splitlines knows more kinds of line ends."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
