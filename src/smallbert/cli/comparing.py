"""Verbs that make several small models of one and put them side by side: demo, compare."""

from __future__ import annotations

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
    ModelOrFamily,
    OneTask,
    Pair,
    Seeds,
    Text,
    Tiny,
    print_json,
    progress,
    read_seeds,
)
from smallbert.cli.telling import BANNER, tell_all, tell_one, tell_troubles
from smallbert.errors import UserError

if TYPE_CHECKING:
    from smallbert.cli.progress import Progress
    from smallbert.measuring.budget import Budget
    from smallbert.measuring.card import Card


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
    limits, numbers = _limits(budget), read_seeds(seeds)
    if not tiny and (model is None or task is None):
        raise UserError("compare needs a MODEL and --task; or write --tiny to check the machinery without either")
    with progress() as say:
        say("starting")
        from smallbert.making import compare as study
        from smallbert.making import starting
        from smallbert.measuring.card import MACHINERY_CHECK, RESULT

        entries = study.read_entries(presets, recipes)
        if tiny:
            groups = study.tiny_groups(entries, model, say.line)
        else:
            columns = {"text": text, "pair": pair, "label": label, "kind": kind}
            read = starting.task_from(str(task), data, examples, say.line, **columns)
            groups = [(entries, starting.start_from(str(model), say.line), read)]
        out = out or ("smallbert-tiny" if tiny else "smallbert-compare")
        cards: list[Card] = []

        def show(before: int, behind: int, card: Card, done: int, total: int) -> None:
            if not json:
                tell_one(say, card, before + done, before + total + behind, len(numbers) > 1)

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
            tell_all(say, cards, tiny)
            tell_troubles(say, cards)
            _name_best(say, cards, limits, tiny)
            say.show(f"Cards and models are in {out}; a page of them: smallbert report {out}")
    if not any(card["status"] == "ok" for card in cards):
        raise typer.Exit(1)


def _limits(budget: str | None) -> Budget | None:
    from smallbert.measuring.budget import Budget

    return None if budget is None else Budget.parse(budget)


def _name_best(say: Progress, cards: list[Card], limits: Budget | None, tiny: bool) -> None:
    from smallbert.cli.progress import prose
    from smallbert.measuring.choice import best

    if not tiny:
        say.show(prose(best(cards, limits).sentence))


def _summary(cards: list[Card], limits: Budget | None, out: str) -> dict[str, Any]:
    from smallbert.measuring.card import MACHINERY_CHECK, card_key
    from smallbert.measuring.choice import best

    facts: dict[str, Any] = {"out": out, "kind": cards[0]["kind"], "budget": str(limits) if limits else None}
    if cards[0]["kind"] == MACHINERY_CHECK:
        return {**facts, "best": None, "sentence": BANNER, "cards": cards}
    choice = best(cards, limits)
    chosen = card_key(**choice.card) if choice.card else None
    return {**facts, "best": chosen, "sentence": choice.sentence, "cards": cards}
