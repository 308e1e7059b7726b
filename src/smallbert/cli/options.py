"""Options that several verbs share, and how results are printed."""

from __future__ import annotations

import json
import sys
from contextvars import ContextVar
from typing import Annotated, Any

import typer

from smallbert.cli.progress import Progress
from smallbert.errors import UserError

COMMAND: ContextVar[str] = ContextVar("command", default="smallbert")

Model = Annotated[str, typer.Argument(help="A hub name, a folder, or all-MiniLM-L6-v2.", metavar="MODEL")]
TaskName = Annotated[
    str, typer.Option("--task", help="A task (see `smallbert list tasks`), or your own file or folder of data.")
]
ModelOrFamily = Annotated[
    str | None, typer.Argument(help="A hub name or a folder; with --tiny, a family.", metavar="MODEL")
]
Again = Annotated[bool, typer.Option("--again", help="Run again what failed.")]
OneTask = Annotated[str | None, typer.Option("--task", help="A task, or your own file or folder of data.")]
Split = Annotated[str, typer.Option("--split", help="Which split: train, dev or test.")]
Seeds = Annotated[str, typer.Option("--seeds", help="Seeds with commas; every recipe is run with each.")]
Out = Annotated[str, typer.Option("--out", help="The folder to write; one that holds something else is refused.")]
Data = Annotated[str | None, typer.Option("--data", help="Where the files of known tasks are (or set SMALLBERT_DATA).")]
Text = Annotated[str | None, typer.Option("--text", help="Your data: the column of the text.")]
Pair = Annotated[str | None, typer.Option("--pair", help="Your data: the column of the second text.")]
Label = Annotated[str | None, typer.Option("--label", help="Your data: the column of the label.")]
Kind = Annotated[str | None, typer.Option("--kind", help="Your data: classify, regress, tag or answer.")]
Examples = Annotated[
    int | None, typer.Option("--examples", help="Train on a sample of this many examples, every class in its share.")
]
Length = Annotated[int | None, typer.Option("--length", help="Truncate texts to this many tokens.")]
Seed = Annotated[int, typer.Option("--seed", help="Random seed.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; by default cuda if there is one.")]
Limits = Annotated[str | None, typer.Option("--budget", help="Limits, such as 'size<=25MB latency<=5ms accuracy>=90'.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Check the machinery in seconds: random model, toy data.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


def progress() -> Progress:
    """Progress on stderr, from one process of a launch."""
    import os

    return Progress(mute=os.environ.get("RANK", "0") != "0")


def print_json(value: Any) -> None:
    """Print a value for programs."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_numbers(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} was given {text!r}; write whole numbers with commas, such as 1,2") from None


def read_seeds(text: str) -> tuple[int, ...]:
    """Seeds separated by commas, each once."""
    seeds = read_numbers(text, "--seeds")
    if min(seeds) < 0 or max(seeds) >= 2**32:
        raise UserError(f"--seeds was given {text!r}; a seed is 0 or more and less than 2**32")
    if len(set(seeds)) < len(seeds):
        twice = next(seed for seed in seeds if seeds.count(seed) > 1)
        raise UserError(f"--seeds was given {text!r}; {twice} twice would be the same run twice, so write another one")
    return tuple(seeds)
