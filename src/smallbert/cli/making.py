"""Verbs that make and measure: demo, finetune, compress, eval, compare."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smallbert.cli.options import (
    COMMAND,
    Again,
    Data,
    Device,
    Examples,
    Json,
    Kind,
    Label,
    Length,
    Limits,
    Model,
    ModelOrFamily,
    OneTask,
    Out,
    Pair,
    Seed,
    Seeds,
    Split,
    TaskName,
    Text,
    Tiny,
    print_json,
    progress,
    read_numbers,
)
from smallbert.errors import UserError

if TYPE_CHECKING:
    from smallbert.cli.progress import Progress
    from smallbert.making.make import Start
    from smallbert.measuring.budget import Budget
    from smallbert.measuring.card import Card
    from smallbert.recipes.recipe import Recipe
    from smallbert.tasks import Task

BANNER = "MACHINERY CHECK: a tiny random model on toy data. These numbers mean nothing."


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer examples: under 3 minutes on 2 cores, not 10.")] = False,
    out: Annotated[str, typer.Option("--out", help="Where models, cards and the report go.")] = "smallbert-demo",
    budget: Annotated[str, typer.Option("--budget", help="Limits that the best model must keep.")] = "size<=40MB",
    json: Json = False,
) -> None:
    """Make a real model small in seven ways, and say which is best: all-MiniLM-L6-v2 on film reviews."""
    limits = _limits(budget)
    with progress() as say:
        say("starting")
        from smallbert.cli.demo import run_demo

        cards, page = run_demo(Path(out), quick, limits, say, COMMAND.get(), silent=json)
        if json:
            print_json({**_summary(cards, limits, out), "page": str(page)})


def finetune(
    model: Model,
    task: TaskName,
    out: Out,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the training examples (3).")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="The learning rate (5e-5).")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Examples per batch (32).")] = None,
    data: Data = None,
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    examples: Examples = None,
    length: Length = None,
    seed: Seed = 0,
    device: Device = None,
    json: Json = False,
) -> None:
    """Train a model on a task: the baseline that small models are measured against."""
    settings = {"epochs": epochs, "lr": lr, "batch": batch}
    given = ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
    options = {"text": text, "pair": pair, "label": label, "kind": kind}
    _make(model, f"finetune({given})", task, out, data, options, examples, length, seed, device, json)


def compress(
    model: Model,
    recipe: Annotated[str, typer.Option("--recipe", help="What to do, such as 'finetune | drop_layers(3) | distill'.")],
    task: TaskName,
    out: Out,
    data: Data = None,
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    examples: Examples = None,
    length: Length = None,
    seed: Seed = 0,
    device: Device = None,
    json: Json = False,
) -> None:
    """Make one small model by a recipe: | means then, + means in the same training phase."""
    options = {"text": text, "pair": pair, "label": label, "kind": kind}
    _make(model, recipe, task, out, data, options, examples, length, seed, device, json)


def _make(
    model: str,
    recipe: str,
    task: str,
    out: str,
    data: str | None,
    columns: dict[str, str | None],
    examples: int | None,
    length: int | None,
    seed: int,
    device: str | None,
    json: bool,
) -> None:
    with progress() as say:
        say("starting")
        from smallbert.making import make
        from smallbert.recipes.recipe import Recipe

        if not recipe.strip():
            raise UserError("--recipe is empty; write one, such as 'drop_layers(3) | distill', or identity for none")
        parsed, begun = Recipe(recipe), time.time()
        read = make.task_from(task, data, examples, say.line, **columns)
        start = make.start_from(model, say.line)
        _forewarn(say, parsed, start, read, length)
        settings: dict[str, Any] = {"length": length, "device": device, "command": COMMAND.get(), "alone": True}
        card = make.make_one(parsed, start, read, seed, out, say=say, **settings)
        if json:
            print_json({"folder": out, "card": card})
        else:
            _show(say, [card])
            if Path(task).exists() and read.note:  # what was guessed of a user's own data
                say.line(f"{task}: {read.note}")
            _warn(say, [card])
            old = (Path(out) / "card.json").stat().st_mtime < begun
            say.show(f"The model is in {out}{'; it was there already, and nothing was run' if old else ''}")
    if card["status"] != "ok":
        raise typer.Exit(1)


def evaluate(
    model: Model,
    task: TaskName,
    split: Split = "dev",
    out: Annotated[str | None, typer.Option("--out", help="A folder to save the card in.")] = None,
    data: Data = None,
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    length: Length = None,
    json: Json = False,
) -> None:
    """Score a model on a task and measure what it costs."""
    with progress() as say:
        say("starting")
        from smallbert.making import make
        from smallbert.making.readme import numbers
        from smallbert.measuring.shelf import save_card

        read = make.task_from(task, data, None, say.line, text=text, pair=pair, label=label, kind=kind)
        read.split(split)
        start = make.start_from(model, say.line)
        card = make.make_eval_card(start, read, split, length=length, command=COMMAND.get(), say=say)
        saved = save_card(card, out) if out else None
        if json:
            return print_json(card)
        say.show(*(f"{name}: {value}" for name, value in numbers(card)))
        _warn(say, [card])
        if saved:
            say.show(f"The card is in {saved}")


def compare(
    model: ModelOrFamily = None,
    presets: Annotated[
        str | None, typer.Option("--presets", help="Names with commas, such as half,int8, or all.")
    ] = None,
    recipes: Annotated[
        str | None, typer.Option("--recipes", help="Recipes with ; between them; {…} and maybe() try each choice.")
    ] = None,
    task: OneTask = None,
    out: Annotated[str | None, typer.Option("--out", help="Where models and cards go (smallbert-compare).")] = None,
    seeds: Seeds = "0",
    budget: Limits = None,
    tiny: Tiny = False,
    again: Again = False,
    data: Data = None,
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    examples: Examples = None,
    length: Length = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Make several small models of one model and task, measure them side by side, and say which is best."""
    limits, numbers = _limits(budget), read_numbers(seeds, "--seeds")
    if not tiny and (model is None or task is None):
        raise UserError("compare needs a MODEL and --task; or write --tiny to check the machinery without either")
    with progress() as say:
        say("starting")
        from smallbert.making import compare as study
        from smallbert.making import make
        from smallbert.measuring.card import MACHINERY_CHECK, RESULT

        entries = study.read_entries(presets, recipes)
        if tiny:
            groups = study.tiny_settings(entries, model, say.line)
        else:
            columns = {"text": text, "pair": pair, "label": label, "kind": kind}
            read = make.task_from(str(task), data, examples, say.line, **columns)
            groups = [(entries, make.start_from(str(model), say.line), read)]
        out = out or ("smallbert-tiny" if tiny else "smallbert-compare")
        cards: list[Card] = []

        def show(before: int, behind: int, card: Card, done: int, total: int) -> None:
            if not json:
                _show_one(say, card, before + done, before + total + behind, len(numbers) > 1)

        left = len(entries)
        for some, start, read in groups:
            left -= len(some)
            cards += study.compare(
                some,
                start,
                read,
                out,
                seeds=numbers,
                length=length,
                kind=MACHINERY_CHECK if tiny else RESULT,
                command=COMMAND.get(),
                device=device,
                say=say,
                line=say.line,
                show=partial(show, len(cards), left * len(numbers)),
                again=again,
                seconds=0.1 if tiny else 2.0,
                budget=limits,
            )
        if json:
            print_json(_summary(cards, limits, out))
        else:
            _show(say, cards, tiny)
            _warn(say, cards)
            _name_best(say, cards, limits, tiny)
            say.show(f"Cards and models are in {out}; a page of them: smallbert report {out}")
    if not any(card["status"] == "ok" for card in cards):
        raise typer.Exit(1)


def _forewarn(say: Progress, recipe: Recipe, start: Start, task: Task, length: int | None) -> None:
    """Say before anything is trained what nothing refuses."""
    from smallbert.making.estimate import look_ahead
    from smallbert.making.make import at_length

    for outlook in look_ahead([recipe], start.encoder, at_length(start, task, length)).values():
        for warning in outlook.warnings:
            say.line(warning)


def _limits(budget: str | None) -> Budget | None:
    from smallbert.measuring.budget import Budget

    return None if budget is None else Budget.parse(budget)


def _show(say: Progress, cards: list[Card], tiny: bool = False) -> None:
    from smallbert.report.table import render_table

    say.show(*([BANNER] if tiny else []), render_table(cards))


def _show_one(say: Progress, card: Card, done: int, total: int, with_seed: bool) -> None:
    from smallbert.report.table import in_one_line

    say.show(f"{done} of {total}: {in_one_line(card, with_seed)}")


def _warn(say: Progress, cards: list[Card]) -> None:
    """Say why runs did not go well, and where they are not the whole story."""
    from smallbert.measuring.groups import short_recipes
    from smallbert.measuring.pruned import note_zeros

    named = [(card["preset"] or recipe, card) for card, recipe in zip(cards, short_recipes(cards), strict=True)]
    for why in dict.fromkeys(f"{card['status']}: {name}: {card['why']}" for name, card in named if card["why"]):
        say.line(why)

    told = (
        (cards[0]["trained"] or {}).get("notes", []) if len(cards) == 1 else [n for c in cards for n in note_zeros(c)]
    )
    for note in dict.fromkeys(told):
        say.line(note)


def _name_best(say: Progress, cards: list[Card], limits: Budget | None, tiny: bool) -> None:
    from smallbert.cli.progress import prose
    from smallbert.measuring.budget import best

    if not tiny:
        say.show(prose(best(cards, limits).sentence))


def _summary(cards: list[Card], limits: Budget | None, out: str) -> dict[str, Any]:
    from smallbert.measuring.budget import best
    from smallbert.measuring.card import MACHINERY_CHECK, card_key

    facts: dict[str, Any] = {"out": out, "kind": cards[0]["kind"], "budget": str(limits) if limits else None}
    if cards[0]["kind"] == MACHINERY_CHECK:
        return {**facts, "best": None, "sentence": BANNER, "cards": cards}
    choice = best(cards, limits)
    chosen = card_key(**choice.card) if choice.card else None
    return {**facts, "best": chosen, "sentence": choice.sentence, "cards": cards}
