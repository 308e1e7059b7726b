"""The demo: the whole job in small, on a real model and real reviews, in minutes on two CPU cores."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from smallbert.cli.progress import Progress, prose
from smallbert.errors import UserError
from smallbert.making.compare import Entry, compare
from smallbert.making.starting import DEMO_DATA, start_from, task_from
from smallbert.measuring.budget import Budget
from smallbert.measuring.card import Card
from smallbert.measuring.choice import best
from smallbert.recipes.recipe import Recipe
from smallbert.report import render_table, write_report
from smallbert.report.table import in_one_line
from smallbert.tasks.derived import limit

MODEL = "all-MiniLM-L6-v2"
BUDGET = "size<=40MB"


class Scale(NamedTuple):
    """How much of everything: examples to train and score on, seconds to time each model, and the first phases."""

    train: int
    dev: int
    seconds: float
    minutes: int
    baseline: str
    student: str


FULL = Scale(3000, 2000, 2.0, 10, "finetune(epochs=1, lr=2e-4)", "train(epochs=1, lr=2e-4)")
# So few examples teach the mean of all tokens, which this model was pretrained to use, better than its first token.
QUICK = Scale(
    1200, 500, 0.7, 3, "head('mean') | finetune(epochs=1, lr=3e-4, batch=16)", "train(epochs=0.5, lr=3e-4, batch=16)"
)

# A short name, what is done to the fine-tuned model, and what that means; {train} is the student's training.
WAYS = (
    (
        "int8 storage",
        "quantize(8)",
        "store weights as 8-bit integers: a quarter of the size, computed as before",
    ),
    (
        "int8 arithmetic",
        "quantize(8, activations=True)",
        "compute in 8-bit integers too, which is faster on a CPU",
    ),
    (
        "3 layers",
        "drop_layers(3) | distill + {train}",
        "keep 3 of 6 layers, and distil the whole model into them",
    ),
    (
        "3 layers, int8 arithmetic",
        "drop_layers(3) | distill + {train} | quantize(8, activations=True)",
        "the same in 8 bits",
    ),
    ("2 layers", "drop_layers(2) | distill + {train}", "keep only 2 layers, distilled in the same way"),
    (
        "4 layers, mixed",
        "drop_layers(4) | mix_layers(init='plain') | distill + {train}",
        "keep 4 layers and read a learned mixture of all",
    ),
    (
        "half the weights",
        "magnitude(0.5) + distill + {train}",
        "gradually set the smaller half of the weights to zero, while distilling",
    ),
)


def run_demo(
    out: Path, quick: bool = False, budget: Budget | None = None, say: Progress | None = None, command: str = "",
    silent: bool = False,
) -> tuple[list[Card], Path]:  # fmt: skip
    """Fine-tune a baseline, make small models of it, measure all, name the best; gives the cards and the page."""
    for package in ("jinja2", "matplotlib"):
        if find_spec(package) is None:  # better now than after minutes of work
            raise UserError(f"the demo ends in a page with plots, which needs {package}; run: pip install -e '.[demo]'")
    say = say or Progress(mute=True)
    scale = QUICK if quick else FULL
    budget = budget or Budget.parse(BUDGET)
    entries, words = demo_entries(scale)

    def tell(*things: object) -> None:
        if not silent:
            say.show(*things)

    about = (
        f"{MODEL} has 6 layers and 22.7 million parameters. It is fine-tuned on {scale.train:,} film reviews to tell "
        f"good ones from bad; then {len(entries) - 1} smaller models are made of it, and each is scored on "
        f"{scale.dev:,} reviews that none was trained on. This takes under {scale.minutes} minutes on two cores, and "
        "seconds when repeated."
    )
    tell(prose(about), "", _what_is_made(entries, words), "")
    say("fetching model and reviews")
    start = start_from(MODEL, say.line)
    task = limit(limit(task_from(DEMO_DATA, line=say.line), scale.train), scale.dev, split="dev")
    cards = compare(
        entries,
        start,
        task,
        out,
        command=command,
        say=say,
        show=lambda card, done, total: tell(f"{done} of {total}: {in_one_line(card)}"),
        seconds=scale.seconds,
        budget=budget,
    )
    tell("\nAll of them, timed in turns:", render_table(cards), prose(best(cards, budget).sentence))
    say("writing the page")
    page = write_report(cards, out / "report", f"{MODEL} made small for film reviews", budget)
    tell(f"The page with plots: {page}\nThe models:          {out / 'models'}")
    return cards, page


def _what_is_made(entries: list[Entry], words: list[str]) -> Any:
    """The name of each model and what it means, in two columns."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for entry, meaning in zip(entries, words, strict=True):
        table.add_row(str(entry.preset), meaning)
    return table


def demo_entries(scale: Scale) -> tuple[list[Entry], list[str]]:
    """The recipes of the demo, all of which begin with the same fine-tuning, and a few words on each."""
    recipes = [(name, Recipe(f"{scale.baseline} | {way.format(train=scale.student)}")) for name, way, _ in WAYS]
    entries = [Entry(Recipe(scale.baseline), "baseline"), *(Entry(recipe, name) for name, recipe in recipes)]
    return entries, ["fine-tune the whole model, the baseline of the others", *(words for *_, words in WAYS)]
