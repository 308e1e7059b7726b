"""A study: recipes (arms) x seeds x tasks, run seed by seed, several at a time, each once, and never dropped silently.

plain = "movement + train(epochs=8)", mixture = "mix_layers | movement + train(epochs=8)", seeds 9 25 39 …
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from smallbert.making.beginnings import common_beginnings, group_recipes, is_made
from smallbert.making.compare import tiny_setting
from smallbert.making.make import work_key
from smallbert.making.places import find_place
from smallbert.making.starting import Line, Start, at_length, start_from, task_from
from smallbert.measuring.card import MACHINERY_CHECK, RESULT, Card, number
from smallbert.measuring.findings import Result
from smallbert.measuring.pruned import weights_left
from smallbert.measuring.shelf import PACK, load_card, load_pack
from smallbert.studies.arms import Arm
from smallbert.tasks import Task
from smallbert.tasks.derived import CHOOSE, with_choice
from smallbert.texts.data import Stream
from smallbert.wheels import to_stderr

ONE_OF = {"--task", "--seeds", "--recipes", "--names", "--vary"}  # options of a study of which a run is one


class Piece(NamedTuple):
    """One run: which task, seed and arm (by number), and the arms whose recipes begin with the same training."""

    task: str
    seed: int
    arm: int
    group: tuple[int, ...]


@dataclass(frozen=True)
class Study:
    """All that says what to run; plain enough to be sent to another process."""

    model: str | None
    tasks: tuple[str, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    out: Path
    vary: str | None = None
    named: bool = False  # whether the arms' names were given, and so belong on the cards
    split: str = "dev"
    kind: str = RESULT
    keep_models: bool = False
    again: bool = False
    command: str = ""
    device: str | None = None
    length: int | None = None
    examples: int | None = None
    data: str | None = None
    columns: dict[str, str | None] = field(default_factory=dict)
    states: Path | None = None  # where runs keep hidden states of frozen backbones for each other


@dataclass
class Bench:
    """What runs are made with, read once: the model to start from, the tasks, and their tokens as they are made."""

    start: Start
    tasks: dict[str, Task]
    streams: dict[str, dict[str, Stream]] = field(default_factory=dict)
    packed: dict[str, Card] = field(default_factory=dict)  # cards of earlier runs that were put into one file


def open_bench(study: Study, line: Line = to_stderr) -> Bench:
    """Read the model and the tasks."""
    if study.kind == MACHINERY_CHECK:
        start, task = tiny_setting(study.model, line)
        tasks = {task.name: task}
    else:
        start = start_from(str(study.model), line)
        tasks = {}
        for given in study.tasks:
            task = task_from(given, study.data, study.examples, line, **study.columns)
            tasks[task.name if task.name not in tasks else given] = task
    if study.split == CHOOSE:
        tasks = {name: with_choice(task) for name, task in tasks.items()}
    tasks = {name: at_length(start, task, study.length) for name, task in tasks.items()}
    for task in tasks.values():
        task.split(study.split)
    return Bench(start, tasks, packed=load_pack(study.out / PACK))


def plan(study: Study, bench: Bench) -> list[list[Piece]]:
    """All runs as jobs, seed by seed over all arms, so that a study broken off is balanced.

    Recipes that begin with the same training are one job, so that it is done once a seed; see `part`.
    """
    recipes = [arm.recipe for arm in study.arms]
    groups = {name: group_recipes(recipes, bench.start, task) for name, task in bench.tasks.items()}
    return [
        [Piece(name, seed, arm, group) for arm in group]
        for seed in study.seeds
        for name in bench.tasks
        for group in groups[name]
    ]


def part(study: Study, bench: Bench, pieces: Sequence[Piece]) -> list[list[Piece]]:
    """One job as jobs that several workers can do: only runs that wait for the same training stay together."""
    made = {text for text, folder in beginnings_of(study, bench, pieces[0]).items() if is_made(folder)}
    recipes = [study.arms[piece.arm].recipe for piece in pieces]
    groups = group_recipes(recipes, bench.start, bench.tasks[pieces[0].task], made)
    return [[pieces[number] for number in group] for group in groups]


def beginnings_of(study: Study, bench: Bench, piece: Piece) -> dict[str, Path]:
    """The trained beginnings that a run shares with others of its group, and where each is kept."""
    recipes, task = [study.arms[number].recipe for number in piece.group], bench.tasks[piece.task]
    return common_beginnings(recipes, bench.start, task, piece.seed, study.out, study.kind, study.split)


def card_of(study: Study, bench: Bench, piece: Piece) -> Card | None:
    """The card of a run if it is there."""
    path = _card_path(study, bench, piece)
    return load_card(path) if path.is_file() else bench.packed.get(path.stem)


def _card_path(study: Study, bench: Bench, piece: Piece) -> Path:
    task, recipe = bench.tasks[piece.task], study.arms[piece.arm].recipe
    return find_place(study.out, work_key(recipe, bench.start, task, piece.seed, study.kind, study.split)).card


def result_of(study: Study, bench: Bench, piece: Piece) -> Result:
    """How a run ended, from its card."""
    arm, card = study.arms[piece.arm], card_of(study, bench, piece)
    facts = (piece.task, arm.name, arm.value, piece.seed)
    if card is None:
        return Result(*facts, "not run")
    ended = card["status"], number(card, "score"), card["why"], card["seconds"]
    return Result(*facts, *ended, weights_left(card), number(card, "size"))


def command_of(study: Study, bench: Bench, piece: Piece) -> str:
    """The study's command for this run alone, which is what makes its card again; empty where there was none."""
    arm, words, kept = study.arms[piece.arm], iter(shlex.split(study.command)), []
    for word in words:
        option, equals, _ = word.partition("=")
        if option not in ONE_OF:
            kept.append(word)
        elif not equals:
            next(words, None)
    own = {"--seeds": str(piece.seed), "--recipes": arm.recipe.brief()}
    if study.tasks:
        own["--task"] = study.tasks[list(bench.tasks).index(piece.task)]
    if study.named:
        own["--names"] = arm.name
    return shlex.join([*kept, *chain(*own.items())]) if kept else ""


def cards_of(study: Study, bench: Bench) -> list[Card]:
    """The cards of all runs that ended so far."""
    found = (card_of(study, bench, piece) for job in plan(study, bench) for piece in job)
    return [card for card in found if card is not None]


def results_of(study: Study, bench: Bench) -> list[Result]:
    """How all runs of a study ended so far, in the order of arms, then seeds."""
    pieces = [piece for job in plan(study, bench) for piece in job]
    places = {name: place for place, name in enumerate(bench.tasks)}
    pieces.sort(key=lambda piece: (places[piece.task], piece.arm, study.seeds.index(piece.seed)))
    return [result_of(study, bench, piece) for piece in pieces]
