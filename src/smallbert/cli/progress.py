"""Progress on stderr: a moving bar on a terminal, elsewhere lines, more rarely the longer a stage takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

LEAST = 2.0  # seconds; a stage that ends sooner leaves no line
FIRST, RAREST = 30.0, 600.0  # seconds until a stage says how far it is, and at most between two such lines
WIDTH = 120  # columns, where there is no terminal to ask
NARROW = 100
SAID_LEAST = ("parameters", "texts/s", "p95 ms", "runs in", "%\nleft")  # columns that go first where room is short


class Progress:
    """Call it as `say(stage, done, total, info)`; a total of 0 means that nobody knows how long it takes.

    >>> with Progress() as say:
    ...     say("training", 20, 94, "loss 0.512")

    A stage ends when all of it is done or when another one begins.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, mute: bool = False):
        """Show progress on a stream (stderr), or nowhere if mute."""
        self.stream, self.clock, self.mute = stream or sys.stderr, clock, mute
        self.stage, self.begun, self.first, self.due, self.told = "", 0.0, 0, 0.0, ""
        self.bars: Any = None
        self.bar: Any = None

    def __enter__(self) -> Progress:
        """Begin; the bar itself comes with the first stage."""
        if self.stream.isatty() and not self.mute:
            self.bars = _make_bars(self.stream)
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self._end()
        self._pause()

    def __call__(self, stage: str, done: int = 0, total: int = 0, info: str = "") -> None:
        """Say how far a stage is."""
        if self.mute:
            return
        if stage != self.stage:
            self._end()
            self.stage, self.begun, self.first = stage, self.clock(), done
            self.due = self.begun + FIRST
            if self.bars is not None:
                self.bar = self.bars.add_task(stage, total=None, info="")
        count = f"{done:,} of {total:,}" if total else ""
        self.told = ", ".join(part for part in (count, info) if part)
        if self.bars is not None:
            self.bars.update(self.bar, total=total or None, completed=done, info=self.told)
            self.bars.start()
        if total and done >= total:
            self._end()
        elif self.bars is None and self.clock() >= self.due:
            self._say_how_far(done, total)

    def line(self, text: str) -> None:
        """Say one line, above the bar if there is one."""
        if not self.mute:
            self._pause()
            print(text, file=self.stream, flush=True)

    def show(self, *things: Any) -> None:
        """Print results (tables, sentences) on stdout, with the bar out of their way."""
        self._pause()
        console = make_console()
        for thing in things:
            _narrow(thing, console.width)
            console.print(thing, soft_wrap=isinstance(thing, str), markup=False, highlight=False)

    def _say_how_far(self, done: int, total: int) -> None:
        """One line in between, where there is no bar; the next when the stage has taken twice as long."""
        took = self.clock() - self.begun
        made = done - self.first  # a stage may go on where an earlier run left it
        left = f", about {took / made * (total - done):.0f} s left" if made > 0 and total else ""
        self._print_stage(took, left)
        self.due = self.clock() + min(took, RAREST)

    def _print_stage(self, took: float, left: str = "") -> None:
        told = f"{self.told} " if self.told else ""
        print(f"{self.stage}: {told}({took:.0f} s{left})", file=self.stream, flush=True)

    def _pause(self) -> None:
        """Take the bar away until there is more to say."""
        if self.bars is not None:
            self.bars.stop()

    def _end(self) -> None:
        if not self.stage:
            return
        took = self.clock() - self.begun
        if self.bars is None and took >= LEAST:
            self._print_stage(took)
        if self.bar is not None:
            self.bars.remove_task(self.bar)
        self.stage, self.told, self.bar = "", "", None


def prose(text: str) -> Any:
    """A sentence that breaks between words on a terminal; elsewhere it stays one line, to be searched and copied."""
    from rich.text import Text

    return Text(text) if sys.stdout.isatty() else text


def make_console() -> Any:
    """A console on stdout, wide enough for a table even where stdout is a file."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    return console if console.is_terminal else Console(file=sys.stdout, width=WIDTH)


def _narrow(thing: Any, width: int) -> None:
    """Leave room for names in a narrow terminal: of a table of models, what says least is not shown there."""
    if width >= NARROW or not any(column.header == "model" for column in getattr(thing, "columns", [])):
        return
    all_well = any(column.header == "status" and set(map(str, column.cells)) == {"ok"} for column in thing.columns)
    for heading in (*["status"] * all_well, *SAID_LEAST):
        if sum(map(_least_width, thing.columns)) <= width:
            return
        _drop(thing, heading)


def _drop(table: Any, heading: str) -> None:
    """Take a column out of a table, and what its caption says of it."""
    table.columns = [column for column in table.columns if column.header != heading]
    said, lines = f"{heading}: ".replace("\n", " "), str(table.caption or "").splitlines()
    table.caption = "\n".join(line for line in lines if not line.startswith(said)) or None


def _least_width(column: Any) -> int:
    """How many letters wide a column is, with room beside it, if no word in it is to be broken."""
    texts = [str(column.header), *map(str, column.cells)]
    parts = [part for text in texts for part in (text.splitlines() if column.no_wrap else text.split())]
    return max(map(len, parts), default=0) + 2


def _make_bars(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[info]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # stdout is left alone: what goes there may be read by another program.
    return Bars(*columns, console=Console(file=stream), transient=True, redirect_stdout=False, refresh_per_second=4)
