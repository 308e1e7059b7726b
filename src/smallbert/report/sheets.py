"""The tables of a study: a row a seed, a row a value, a row a task, and every two arms against each other."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from smallbert.measuring.findings import ENDS, FEW, Cell, Pair, Result, brief, compare_cells, marks_by_chance, p_value
from smallbert.measuring.pruned import ABOUT as LEFT

if TYPE_CHECKING:
    from rich.table import Table

DIVERGED, BEYOND, NONE = "†", "*", "-"


class Sheet(NamedTuple):
    """One table: its title, its columns, its rows of text, and what must be known to read it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


class About(NamedTuple):
    """What a study was about, for the page: {task: (metric, kind, what guessing scores)}, [(arm, value, recipe)]."""

    model: str
    split: str
    command: str
    tasks: Mapping[str, tuple[str, str, float | None]]
    arms: list[tuple[str, Any, str]]
    setting: str | None = None
    judged: bool = True  # whether runs that learned nothing were told apart


def seeds_sheet(cells: Sequence[Cell], about: About) -> Sheet:
    """A row a seed, a column an arm; then the means with and without what diverged, and how often that happened.

    Of many arms, or of one seed, each arm is a row; one seed has no means.
    """
    metric = about.tasks[cells[0].task][0]
    seeds = list(dict.fromkeys(run.seed for cell in cells for run in cell.runs))
    runs = [{run.seed: run for run in cell.runs} for cell in cells]
    rows = [[str(seed), *(_score(own.get(seed)) for own in runs)] for seed in seeds]
    lost = any(cell.count("diverged") for cell in cells)
    if len(seeds) > 1:
        means = {"mean ± sd of survivors (n)": "survivors", f"mean ± sd with {DIVERGED} counted (n)": "all"}
        for heading, over in (means if lost else {"mean ± sd (n)": "all"}).items():
            found = [getattr(cell, over) for cell in cells]
            rows.append([heading, *(f"{brief(mean, 2)} ({mean.n})" for mean in found)])
        rows.append(["diverged (95 % interval)", *(_diverged(cell) for cell in cells)])
    if any(cell.count("failed", "not run") for cell in cells):
        rows.append(["missing", *(_missing(cell) for cell in cells)])
    notes = [f"{DIVERGED} diverged" if lost else ""]
    if any(cell.is_pruned for cell in cells):
        rows.append(["% of weights left", *(NONE if cell.left is None else str(cell.left) for cell in cells)])
        notes.append(f"% left: {LEFT}")
    sizes = [NONE if cell.size is None else f"{cell.size / 1e6:.1f}" for cell in cells]
    if len({*sizes} - {NONE}) > 1:
        rows.append(["MB", *sizes])
    if not about.judged:
        notes.append("a tiny random model learns nothing, so only a loss that is not finite counts as diverged")
    at = "" if about.setting is None else f", {about.setting} = {cells[0].value}"
    title = f"{cells[0].task}, {metric} on {about.split}{at}"
    columns, notes = ["seed", *(cell.arm for cell in cells)], [note for note in notes if note]
    if len(cells) > FEW or len(seeds) == 1:  # a row an arm
        named, *rows = (list(line) for line in zip(columns, *rows, strict=True))
        columns = ["", *(f"seed {seed}" for seed in seeds), *named[1 + len(seeds) :]]
    return Sheet(title, columns, rows, notes)


def varied_sheet(cells: Sequence[Cell], setting: str) -> Sheet:
    """A row a value, a column an arm."""
    arms, values = (list(dict.fromkeys(each)) for each in ([c.arm for c in cells], [c.value for c in cells]))
    of = {(cell.arm, cell.value): cell for cell in cells}
    rows = [[str(value), *(_mean(of[arm, value]) for arm in arms)] for value in values]
    return Sheet(f"{cells[0].task} by {setting}", [setting, *arms], rows, [_KEY])


def pairs_sheet(pairs: Sequence[Pair], setting: str | None, many: bool) -> Sheet:
    """Every two arms against each other; of many, all against the first."""
    arms = dict.fromkeys(arm for pair in pairs for arm in (pair.one.arm, pair.other.arm))
    first = next(iter(arms))
    many_arms = len(arms) > FEW
    if many_arms:
        pairs = [pair for pair in pairs if pair.one.arm == first]
    columns = ["difference", "survivors", f"with {DIVERGED}", "Fisher's p", "paired ± its error (n)", "sign-flip p"]
    rows = []
    for pair in pairs:
        where = [pair.one.task] * many + [str(pair.one.value)] * (setting is not None)
        error = "" if pair.paired.error is None else f" ± {pair.paired.error:.2f}"
        numbers = [_signed(pair.survivors), _signed(pair.all), NONE if pair.fisher is None else p_value(pair.fisher)]
        numbers += [f"{_signed(pair.paired.value)}{error} ({pair.paired.n})"]
        numbers += [NONE if pair.flips is None else p_value(pair.flips)]
        rows.append([*where, f"{pair.other.arm} - {pair.one.arm}", *numbers])
    least = min((2 / 2**pair.paired.n for pair in pairs if pair.paired.n), default=1.0)
    notes = [
        "Fisher's exact test is on how many diverged; paired is over seeds where both have a score, diverged runs "
        f"included; no sign-flip p here can be below {p_value(min(least, 1.0))}"
    ]
    named = ["task"] * many + [setting or ""] * (setting is not None)
    if many_arms:
        notes.append("all pairs of arms are in study.json")
    return Sheet(f"against {first}" if many_arms else "all pairs of arms", [*named, *columns], rows, notes)


def tasks_sheet(cells: Sequence[Cell], setting: str | None) -> Sheet:
    """A row a task, a column an arm, then what each arm gains on the first."""
    arms, tasks = (list(dict.fromkeys(each)) for each in ([c.arm for c in cells], [c.task for c in cells]))
    of = {(cell.task, cell.arm): cell for cell in cells}
    rows, pairs = [], []
    for task in tasks:
        row = [task, *(_mean(of[task, arm]) for arm in arms)]
        for arm in arms[1:]:
            pair = compare_cells(of[task, arms[0]], of[task, arm])
            pairs.append(pair)
            error = "" if pair.paired_survivors.error is None else f" ± {pair.paired_survivors.error:.2f}"
            row.append(_signed(pair.paired_survivors.value) + error + (f" {BEYOND}" if pair.is_beyond else ""))
        rows.append(row)
    marked, notes = sum(pair.is_beyond for pair in pairs), [_KEY]
    tested = [pair for pair in pairs if pair.paired_survivors.n > 1]
    if tested:
        notes.append(
            f"differences are over seeds where neither diverged, with their standard error; {BEYOND} beyond two of "
            f"them: {marked} of {len(tested)} tested, where about {marks_by_chance(pairs):.1f} are to be expected by "
            "chance alone with so few seeds"
        )
    at = "" if setting is None else f", {setting} = {cells[0].value}"
    gains = [f"{arm} - {arms[0]}" for arm in arms[1:]]
    return Sheet(f"{len(tasks)} tasks{at}", ["task", *arms, *gains], rows, notes)


_KEY = f"mean ± standard deviation of survivors; n {DIVERGED}: n runs diverged and are left out"


def _score(run: Result | None) -> str:
    if run is None or run.status not in ENDS:
        return "not run" if run is None else run.status
    score = "no score" if run.score is None else f"{run.score:.2f}"
    return f"{score} {DIVERGED}" if run.status == "diverged" else score


def _mean(cell: Cell) -> str:
    bad, absent = cell.count("diverged"), cell.count("failed", "not run")
    parts = [f"{bad} {DIVERGED}" if bad else "", f"{absent} missing" if absent else ""]
    told = ", ".join(part for part in parts if part)
    return brief(cell.survivors, 2) + (f" ({told})" if told else "")


def _diverged(cell: Cell) -> str:
    if cell.interval is None:
        return NONE
    low, high = cell.interval
    return f"{cell.count('diverged')} of {cell.count(*ENDS)} ({100 * low:.0f} to {100 * high:.0f} %)"


def _missing(cell: Cell) -> str:
    counts = {status: cell.count(status) for status in ("failed", "not run")}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "0"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.2f}"


def render_sheet(sheet: Sheet) -> "Table":
    """A table for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    caption = "; ".join(sheet.notes) or None
    looks: dict[str, Any] = {"title_justify": "left", "caption_justify": "left", "title_style": "bold"}
    table = Table(title=sheet.title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, **looks)
    for place, column in enumerate(sheet.columns):
        table.add_column(Text(column), justify="right" if place else "left", overflow="fold")
    for row in sheet.rows:
        bad = any(cell.endswith(DIVERGED) or cell == "failed" for cell in row[1:])
        table.add_row(*map(Text, row), style="red" if bad else "")
    return table
