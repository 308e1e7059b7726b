"""Many recipes on one model and task: each made once, resumable, its time measured in turns with the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smallbert.errors import UserError
from smallbert.machine.files import alone_in
from smallbert.machine.processes import processes
from smallbert.making.beginnings import common_beginnings, forget
from smallbert.making.estimate import look_ahead
from smallbert.making.make import give_up, make_one, why_of, work_key, write_card
from smallbert.making.places import clear_work, find_place, is_begun, words_of_all
from smallbert.making.starting import Line, Say, Start, at_length, quiet, tiny_start
from smallbert.measuring import cost
from smallbert.measuring.budget import Budget
from smallbert.measuring.card import RESULT, Card, card_key
from smallbert.measuring.shelf import keep_budget
from smallbert.model.anatomy import FAMILIES
from smallbert.model.answering import match_labels
from smallbert.model.encoder import HEAD
from smallbert.model.folders import load_folder
from smallbert.presets import PRESETS
from smallbert.recipes.recipe import Recipe
from smallbert.recipes.space import expand_space
from smallbert.wheels import to_stderr

if TYPE_CHECKING:
    from smallbert.tasks import Task

AS_GIVEN = "as given"
FIRST_LOOK = 0.3  # seconds; a model's own timing is only a first look, all are timed in turns at the end


class Entry(NamedTuple):
    """One recipe of a comparison, and the preset it comes from if any."""

    recipe: Recipe
    preset: str | None = None


def read_entries(presets: str | None = None, recipes: str | None = None) -> list[Entry]:
    """What to compare: names separated by commas, and recipes separated by semicolons, each of which may be a space.

    >>> read_entries("baseline, int8", "finetune | drop_layers({2, 3}) | distill")      # four entries
    """
    names = [name.strip() for name in (presets or "").split(",") if name.strip()]
    names = list(PRESETS) if names == ["all"] else names
    texts = [text.strip() for text in (recipes or "").split(";") if text.strip()]
    found = [Entry(Recipe(PRESETS[name].recipe), PRESETS[name].name) for name in names]
    found += [Entry(recipe) for text in texts for recipe in expand_space(text)]
    if not found:
        raise UserError("there is nothing to compare: write --presets baseline,int8 or --recipes 'finetune; half'")
    once: dict[str, Entry] = {}
    for entry in found:
        once.setdefault(entry.recipe.key(), entry)
    return list(once.values())


def compare(
    entries: Sequence[Entry],
    start: Start,
    task: Task,
    out: Path | str,
    *,
    seeds: Iterable[int] = (0,),
    length: int | None = None,
    kind: str = RESULT,
    command: str = "",
    device: str | None = None,
    say: Say = quiet,
    line: Line = lambda text: None,
    show: Callable[[Card, int, int], None] = lambda card, done, total: None,
    again: bool = False,
    seconds: float = 2.0,
    budget: Budget | None = None,
) -> list[Card]:
    """Make every recipe with every seed and give the cards; `show` is told of each, and how many of how many are made.

    A run that fails becomes a card that says why, at once where that can be known, and the others go on. What is
    finished is never made again, and what was begun goes on where it was. `line` is told what should be known before.
    The budget decides nothing here; it is kept beside the cards for their page.
    """
    out, seeds = Path(out), list(dict.fromkeys(seeds))
    if HEAD in start.encoder.heads and all(len(entry.recipe) for entry in entries):
        try:
            match_labels(start.encoder, task)
        except UserError as error:
            line(f"there is no row {AS_GIVEN!r}: {error}")
        else:  # what the others were made of is what they are measured by
            entries = [Entry(Recipe(""), AS_GIVEN), *entries]
    cards: list[Card] = []
    task = at_length(start, task, length)
    total = len(entries) * len(seeds)
    main = processes().is_main_process
    with alone_in(out) if main else nullcontext():
        if main:
            keep_budget(out, budget)
            _give_up_early(entries, start, task, out, seeds, kind, command, say, line)
        for seed in seeds:
            common = common_beginnings([entry.recipe for entry in entries], start, task, seed, out, kind)
            for entry in entries:
                title = f"model {len(cards) + 1} of {total}"
                card = make_one(
                    entry.recipe,
                    start,
                    task,
                    seed,
                    out,
                    preset=entry.preset,
                    kind=kind,
                    command=command,
                    device=device,
                    say=lambda stage, *rest, title=title: say(f"{title}: {stage}", *rest),
                    keep_going=True,
                    again=again,
                    seconds=FIRST_LOOK,
                    common=common,
                    said=words_of_all(out),
                )
                cards.append(card)
                show(card, len(cards), total)
            forget(common)
        if main:
            cards = time_in_turns(cards, out, say, seconds)
            clear_work(out)
    return cards


def _give_up_early(
    entries: Sequence[Entry],
    start: Start,
    task: Task,
    out: Path,
    seeds: list[int],
    kind: str,
    command: str,
    say: Say,
    line: Line,
) -> None:
    """Write the cards of recipes that do not fit the model before others are trained for hours, and say the rest."""
    found, begun = look_ahead([entry.recipe for entry in entries], start.encoder, task, say), is_begun(out)
    for warning in dict.fromkeys(warning for entry in entries for warning in found[entry.recipe].warnings):
        line(warning)
    refused = {entry: error for entry in entries if not begun and (error := found[entry.recipe].refused)}
    for entry, error in refused.items():
        for seed in seeds:
            if not find_place(out, work_key(entry.recipe, start, task, seed, kind)).card.is_file():
                facts: dict[str, Any] = {"preset": entry.preset, "kind": kind, "command": command}
                give_up(entry.recipe, start, task, seed, out, why_of(error), **facts)


def tiny_setting(family: str | None = None, line: Line = to_stderr) -> tuple[Start, Task]:
    """A tiny random model and a toy task, to check in seconds that recipes run."""
    from smallbert.tiny import make_task

    if family is not None and family not in FAMILIES:
        line(f"--tiny: a tiny random bert replaces {family}; for another family, write one of {', '.join(FAMILIES)}")
        family = None
    return tiny_start(family or "bert"), make_task()


def tiny_groups(
    entries: Sequence[Entry], family: str | None = None, line: Line = to_stderr
) -> list[tuple[list[Entry], Start, Task]]:
    """Which recipes to check with what: those that ask for more than the tiny model has get a wider one, and less data.

    What fits neither is left to the tiny one, which says why.
    """
    from smallbert.tiny import make_task

    start, task = tiny_setting(family, line)
    found = look_ahead([entry.recipe for entry in entries], start.encoder, task)
    if not (refused := [entry for entry in entries if found[entry.recipe].refused]):
        return [(list(entries), start, task)]
    wide, short = tiny_start(start.encoder.family, wide=True), replace(make_task(32), name="toy-short")
    found = look_ahead([entry.recipe for entry in refused], wide.encoder, short)
    if not (wider := [entry for entry in refused if not found[entry.recipe].refused]):
        return [(list(entries), start, task)]
    names = ", ".join(entry.preset or entry.recipe.brief() for entry in wider)
    line(
        f"--tiny: what {names} would make is larger than a model {start.encoder.width} wide, so a random one "
        f"{wide.encoder.width} wide and {len(short.split('train'))} examples are taken for it, which takes "
        "a minute or more a recipe"
    )
    rest = [entry for entry in entries if entry not in wider]
    return [(rest, start, task), (wider, wide, short)] if rest else [(wider, wide, short)]


def time_in_turns(cards: list[Card], out: Path, say: Say = quiet, seconds: float = 2.0) -> list[Card]:
    """The cards with latencies of one common measurement, in which the models took turns; nothing is timed twice."""
    places = {key: find_place(out, key) for card in cards if card["status"] == "ok" for key in [card_key(**card)]}
    places = {key: place for key, place in places.items() if place.model.is_dir()}
    together = hashlib.sha256(" ".join(sorted(places)).encode()).hexdigest()[:10]
    timed = [card for card in cards if card_key(**card) in places]
    if not timed or all((card["latency"] or {}).get("together") == together for card in timed):
        return cards
    say("timing all models in turns", 0, 0, f"about {seconds * len(places):.0f} s")
    encoders = {key: load_folder(place.model) for key, place in places.items()}
    found = cost.measure_latencies(encoders, timed[0]["macs"]["length"], seconds=seconds)
    for card in timed:
        latency = {name: value for name, value in found[card_key(**card)].items() if name != "ratio"}
        latency |= {name: float(f"{latency[name]:.6g}") for name in ("p50_ms", "p95_ms")}
        card["latency"] = {**latency, "together": together}
        card["missing"].pop("latency", None)
        write_card(places[card_key(**card)], card)
    return cards
