"""Cards taken together: runs that differ only in their seed become one row, and each row gets a short name."""

import ast
import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from smallbert.errors import UserError
from smallbert.measuring.card import Card
from smallbert.recipes.recipe import Recipe

NOTHING = "identity"  # the recipe of a model to which nothing was done
ALWAYS_SHOWN = ("keep", "bits")  # the dials; other settings show in a name only where they differ between rows


def group_cards(cards: Sequence[Card]) -> list[Card]:
    """One card per (model, recipe, task): means over the seeds that went well, and in `runs` how many did not.

    >>> group_cards([seed_0, seed_1, seed_2])[0]["runs"]
    {'n': 3, 'ok': 2, 'diverged': 1, 'failed': 0, 'seeds': [0, 1, 2], 'sd': 0.31}
    """
    groups: dict[tuple[Any, ...], dict[int, Card]] = {}
    for card in cards:
        if "runs" in card:  # grouped before
            groups[(id(card),)] = {card["seed"]: card}
            continue
        key = (card["model_fingerprint"], card["recipe"], card["task"], card["task_fingerprint"], card["kind"])
        groups.setdefault(key, {})[card["seed"]] = card
    return [_together(list(members.values())) for members in groups.values()]


def score_of(card: Card) -> tuple[float | None, float | None]:
    """Headline score and its error: over seeds (sd) where there are several, else the sampling error.

    >>> score_of(card)
    (88.4, 0.7)
    """
    score = (card["scores"] or {}).get(card["headline"]) or {}
    sd = card.get("runs", {}).get("sd")
    return score.get("value"), score.get("stderr") if sd is None else sd


def standard_error(card: Card) -> float:
    """How far the headline score may be off: the larger of the sampling error and the error of the mean over seeds."""
    score, runs = (card["scores"] or {}).get(card["headline"]) or {}, card.get("runs", {})
    over_seeds = runs["sd"] / math.sqrt(runs["ok"]) if runs.get("sd") is not None else 0.0
    return max(score.get("stderr") or 0.0, over_seeds)


def status_of(card: Card) -> str:
    """How the runs behind a card ended, in words.

    >>> status_of(card)
    '2 of 3 ok, 1 diverged'
    """
    runs = card.get("runs") or {"n": 1}
    if runs["n"] == 1:
        return str(card["status"])
    bad = "".join(f", {runs[status]} {status}" for status in ("diverged", "failed") if runs[status])
    return f"{runs['ok']} of {runs['n']} ok{bad}"


def short_names(cards: Sequence[Card]) -> list[str]:
    """A name for each card: its preset, else its recipe with only the settings that tell it from the others.

    >>> short_names(cards)
    ['finetune', 'finetune | drop_layers(3)', 'finetune | drop_layers(3) | quantize(8)']
    """
    recipes = short_recipes(cards)
    names = [card["preset"] or recipe for card, recipe in zip(cards, recipes, strict=True)]
    names = _told_apart(names, [f"{name}: {recipe}" for name, recipe in zip(names, recipes, strict=True)])
    names = _told_apart(names, [f"{card['model']}: {name}" for card, name in zip(cards, names, strict=True)])
    return _told_apart(names, [f"{name} #{place}" for place, name in enumerate(names, 1)])


def given_name(card: Card) -> str:
    """A name for a card that is alone: its preset, else its recipe with the settings that were given.

    >>> given_name(card)
    'finetune(lr=0.0001) | quantize(4, scope="group")'
    """
    try:
        return str(card["preset"] or Recipe(card["recipe"]).brief())
    except UserError:  # a card of long ago may have a recipe that is none any more
        return short_names([card])[0]


def short_recipes(cards: Sequence[Card]) -> list[str]:
    """Each card's recipe with its dials (keep, bits) and those settings that differ between the cards."""
    trees = [_parse(card["recipe"]) for card in cards]
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for tree in trees:
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree else ():
            for keyword in call.keywords:
                values[ast.unparse(call.func), str(keyword.arg)].add(ast.unparse(keyword.value))
    shown = {setting for setting, found in values.items() if len(found) > 1 or setting[1] in ALWAYS_SHOWN}
    return [_short(tree, shown) if tree else card["recipe"] for card, tree in zip(cards, trees, strict=True)]


def pick_baseline(cards: Sequence[Card]) -> Card | None:
    """What the others are compared with: the preset `baseline`, else what least was done to, else the largest.

    One that is plainly smaller than another is nothing to measure others by, so that there may be none; but what all
    others were made of always is, however few bytes its weights have.
    """
    good = [card for card in cards if card["status"] == "ok"]
    named = [card for card in good if card["preset"] == "baseline"]
    models = {card["model_fingerprint"] for card in cards}
    named = named or [card for card in good if card["recipe"] == NOTHING and len(models) == 1]
    chosen = min(named or good, key=lambda card: (_steps(card["recipe"]), -_size(card)), default=None)
    return chosen if named or chosen is None or _size(chosen) >= 0.9 * max(map(_size, cards)) else None


def _size(card: Card) -> float:
    return (card["bytes"] or {}).get("total") or 0


def _together(members: list[Card]) -> Card:
    if "runs" in members[0]:
        return members[0]
    good = [card for card in members if card["status"] == "ok"]
    counts = {status: sum(card["status"] == status for card in members) for status in ("ok", "diverged", "failed")}
    base = (good or sorted(members, key=lambda card: card["status"]))[0]
    values = [card["scores"][card["headline"]]["value"] for card in good]
    values = [value for value in values if value is not None]
    runs = {
        "n": len(members),
        **counts,
        "seeds": sorted(card["seed"] for card in members),
        "sd": stdev(values) if len(values) > 1 else None,
    }
    whys = dict.fromkeys(card["why"] for card in members if card["why"])
    mean = {name: _mean([card[name] for card in good or members]) for name in ("scores", "bytes", "parameters", "macs")}
    mean |= {name: _mean([card[name] for card in good or members]) for name in ("latency", "throughput", "seconds")}
    mean["right"] = [card["right"] for card in good]  # of each seed
    return {**base, **mean, "why": "; ".join(whys) or None, "runs": runs}


def _mean(values: list[Any]) -> Any:
    """The mean of numbers, taken part by part in dictionaries; what is equal everywhere stays as it is."""
    present = [value for value in values if value is not None]
    if not present or all(value == present[0] for value in present):
        return present[0] if present else None
    if isinstance(present[0], dict):
        keys = dict.fromkeys(key for value in present for key in value)
        return {key: _mean([value.get(key) for value in present]) for key in keys}
    return fmean(present) if all(isinstance(value, int | float) for value in present) else present[0]


def _parse(recipe: str) -> ast.expr | None:
    try:
        return ast.parse(recipe, mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _short(node: ast.expr, shown: set[tuple[str, str]]) -> str:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.Add):
        sign = "|" if isinstance(node.op, ast.BitOr) else "+"
        return f"{_short(node.left, shown)} {sign} {_short(node.right, shown)}"
    if not isinstance(node, ast.Call):
        return ast.unparse(node)
    name = ast.unparse(node.func)
    settings = [_short(argument, shown) for argument in node.args]
    for keyword in node.keywords:
        if (name, str(keyword.arg)) in shown:
            value = ast.unparse(keyword.value)
            settings.append(value if keyword.arg in ALWAYS_SHOWN else f"{keyword.arg}={value}")
    return f"{name}({', '.join(settings)})" if settings else name


def _steps(recipe: str) -> int:
    tree = _parse(recipe)
    return 1 + sum(isinstance(node, ast.BinOp) for node in ast.walk(tree)) if tree else int(bool(recipe.strip()))


def _told_apart(names: list[str], longer: list[str]) -> list[str]:
    """The names, with those that occur twice replaced by their longer form."""
    return [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]
