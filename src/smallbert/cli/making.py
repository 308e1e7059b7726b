"""Verbs that make or measure one model: finetune, compress, eval."""

from __future__ import annotations

import time
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smallbert.cli.options import (
    COMMAND,
    Data,
    Device,
    Examples,
    Json,
    Kind,
    Label,
    Length,
    Model,
    Out,
    Pair,
    Seed,
    Split,
    TaskName,
    Text,
    print_json,
    progress,
)
from smallbert.cli.telling import tell_all, tell_troubles
from smallbert.errors import UserError

if TYPE_CHECKING:
    from smallbert.cli.progress import Progress
    from smallbert.making.starting import Start
    from smallbert.recipes.recipe import Recipe
    from smallbert.tasks import Task


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
    if endless := [name for name, value in settings.items() if value is not None and not isfinite(value)]:
        raise UserError(f"--{endless[0]} was given {settings[endless[0]]}; write a number above 0")
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
        from smallbert.making import make, starting
        from smallbert.recipes.recipe import Recipe

        if not recipe.strip():
            raise UserError("--recipe is empty; write one, such as 'drop_layers(3) | distill', or identity for none")
        parsed, begun = Recipe(recipe), time.time()
        read = starting.task_from(task, data, examples, say.line, **columns)
        start = starting.start_from(model, say.line)
        _forewarn(say, parsed, start, read, length)
        settings: dict[str, Any] = {"length": length, "device": device, "command": COMMAND.get(), "alone": True}
        card = make.make_one(parsed, start, read, seed, out, say=say, **settings)
        if json:
            print_json({"folder": out, "card": card})
        else:
            tell_all(say, [card])
            tell_troubles(say, [card])
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
        from smallbert.making import make, starting
        from smallbert.making.readme import numbers
        from smallbert.measuring.shelf import card_beside, save_card

        read = starting.task_from(task, data, None, say.line, text=text, pair=pair, label=label, kind=kind)
        read.split(split)
        start = starting.start_from(model, say.line)
        own = card_beside(start.folder)[0] if start.folder is not None else None
        if own is not None and own["status"] != "ok":
            say.line(f"{model} was made by a run that its card calls {own['status']}: {own['why']}")
        card = make.make_eval_card(start, read, split, length=length, command=COMMAND.get(), say=say)
        saved = save_card(card, out) if out else None
        if json:
            return print_json(card)
        say.show(*(f"{name}: {value}" for name, value in numbers(card)))
        tell_troubles(say, [card])
        if saved:
            say.show(f"The card is in {saved}")


def _forewarn(say: Progress, recipe: Recipe, start: Start, task: Task, length: int | None) -> None:
    """Say before anything is trained what nothing refuses."""
    from smallbert.making.estimate import look_ahead
    from smallbert.making.starting import at_length

    for outlook in look_ahead([recipe], start.encoder, at_length(start, task, length)).values():
        for warning in outlook.warnings:
            say.line(warning)
