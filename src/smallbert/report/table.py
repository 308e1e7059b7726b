"""The table: one row per model, each number next to what it means against the baseline."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from smallbert.measuring.budget import show
from smallbert.measuring.card import Card, number, reason
from smallbert.measuring.choice import PLAINLY
from smallbert.measuring.groups import given_name, group_cards, pick_baseline, score_of, short_names, status_of
from smallbert.measuring.pruned import ABOUT as LEFT
from smallbert.measuring.pruned import weights_left

if TYPE_CHECKING:
    from rich.table import Table

NONE = "-"


class Column(NamedTuple):
    """One column: its key in a row, its heading, and what it means, in words for the page."""

    key: str
    heading: str
    about: str


COLUMNS = (
    Column("task", "task", "What the model was trained and scored on."),
    Column("model", "model", "The preset, or the recipe with the settings in which it differs from the other rows."),
    Column(
        "score",
        "score",
        "The task's main metric on a scale of 0 to 100, higher is better. After ± is the standard error of one run "
        "from the number of examples scored, or, where several seeds were run, the standard deviation over the seeds.",
    ),
    Column("seeds", "seeds", "How many seeds the score is a mean of, out of those run."),
    Column("versus", "vs baseline", "Points gained or lost against the baseline."),
    Column("megabytes", "MB", "Size on disk of the files that are needed to run the model; 1 MB is a million bytes."),
    Column(
        "smaller",
        "x smaller",
        "MB of the baseline divided by MB of this model. A model that was trained is saved in float32, so it may be "
        "larger than the files it was made from; a row 'as given' weighs those files themselves.",
    ),
    Column("ms", "ms", "Measured time of one batch, median over repeated runs (p50)."),
    Column("faster", "x faster", "Time of the baseline divided by time of this model; below 1 it is slower."),
    Column("parameters", "parameters", "How many parameters the model has, embeddings and zeros included."),
    Column("left", "% left", f"{LEFT[0].upper()}{LEFT[1:]}."),
    Column(
        "status", "status", "How training ended. A run that diverged or failed is shown, but never chosen or drawn."
    ),
)


class Row(NamedTuple):
    """One model of the table: the text of its cells, what to sort each by, and the card of its runs taken together."""

    cells: dict[str, str]
    order: dict[str, float | str]
    card: Card
    is_baseline: bool
    reasons: dict[str, str]


def format_rows(cards: Sequence[Card], baseline: Card | None = None) -> list[dict[str, str]]:
    """The table as plain text cells, in the order the cards came; each task has its own baseline unless one is given.

    >>> format_rows(cards)[1]
    {'model': 'quantize(8)', 'score': '79.5 ± 0.9', 'versus': '-0.1', 'megabytes': '23.1', 'smaller': '3.9x', …}
    """
    rows = make_rows(cards, baseline)
    shown = [column.key for column in shown_columns(rows)]
    return [{key: row.cells[key] for key in shown} for row in rows]


def render_table(cards: Sequence[Card], baseline: Card | None = None) -> "Table":
    """The table for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = make_rows(cards, baseline)
    columns = shown_columns(rows)
    looks: dict[str, Any] = {"pad_edge": False, "collapse_padding": True, "header_style": "bold"}
    notes = [f"% left: {LEFT}"] if any(column.key == "left" for column in columns) else []
    notes += note_sizes(rows)
    table = Table(box=box.SIMPLE_HEAD, caption="\n".join(notes) or None, caption_justify="left", **looks)
    for column in columns:
        words = column.key in ("task", "model", "status")
        table.add_column(
            column.heading.replace(" ", "\n"), justify="left" if words else "right", no_wrap=not words, overflow="fold"
        )
    for row in rows:
        bad = row.card["status"] != "ok"
        table.add_row(
            *(Text(row.cells[column.key]) for column in columns),
            style="red" if bad else "bold" if row.is_baseline else "",
        )
    return table


def in_one_line(card: Card, with_seed: bool = False) -> str:
    """What came of one run, without its time, since times compare only where all models were timed together.

    >>> in_one_line(card)
    'quantize(8): accuracy 79.5 ± 0.9 at 23.1 MB'
    """
    (value, error), size = score_of(card), number(card, "size")
    told = [] if card["status"] == "ok" else [card["status"]]
    if value is not None:
        spread = "" if error is None else f" ± {error:.1f}"
        told.append(f"{card['headline']} {value:.1f}{spread}" + ("" if size is None else f" at {show('size', size)}"))
    seed = f", seed {card['seed']}" if with_seed else ""
    return f"{given_name(card)}{seed}: {', '.join(told)}"


def make_rows(cards: Sequence[Card], baseline: Card | None = None) -> list[Row]:
    """One row per (model, recipe, task), seeds taken together."""
    groups = group_cards(cards)
    names = short_names(groups) if len(groups) > 1 else [given_name(card) for card in groups]
    rows = []
    for card, name in zip(groups, names, strict=True):
        same_task = [other for other in groups if task_key(other) == task_key(card)]
        base = group_cards([baseline])[0] if baseline else pick_baseline(same_task)
        rows.append(_row(card, name, base))
    return rows


def shown_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns worth showing: the task only where there are several, seeds only where more than one was run, …"""
    hidden = set()
    if len({task_key(row.card) for row in rows}) < 2:
        hidden.add("task")
    if all(row.card["runs"]["n"] == 1 for row in rows):
        hidden.add("seeds")
    if not any(left.is_pruned for row in rows if (left := weights_left(row.card)) is not None):
        hidden.add("left")
    if len(rows) == 1:  # nothing to compare it with
        hidden |= {"versus", "smaller", "faster"}
    return [column for column in COLUMNS if column.key not in hidden]


def note_sizes(rows: Sequence[Row]) -> list[str]:
    """Say where a baseline is larger than the files it was made from, since a user may have those in mind.

    >>> note_sizes(rows)
    ['x smaller counts from finetune as it was saved here, 134 MB; the files of e5-small, …, take 67.7 MB']
    """
    found = []
    for card, name in ((row.card, row.cells["model"]) for row in rows if row.is_baseline and len(rows) > 1):
        size, given = number(card, "size"), card["model_bytes"]
        if size is not None and given is not None and size > PLAINLY * given:
            saved = f"x smaller counts from {name} as it was saved here, {show('size', size)}"
            found.append(f"{saved}; the files of {card['model']}, which it was made from, take {show('size', given)}")
    return list(dict.fromkeys(found))


def task_key(card: Card) -> tuple[str, str, str]:
    """What must be equal for two scores to be comparable: the task, its examples, and the metric."""
    return card["task"], card["task_fingerprint"], card["headline"]


def _row(card: Card, name: str, base: Card | None) -> Row:
    value, error = score_of(card)
    runs, left = card["runs"], weights_left(card)
    is_baseline = base is not None and (card["recipe"], card["model_fingerprint"], task_key(card)) == (
        base["recipe"],
        base["model_fingerprint"],
        task_key(base),
    )
    numbers: dict[str, float | None] = {
        "score": value,
        "seeds": runs["ok"],
        "versus": None if base is None else _minus(value, number(base, "score")),
        "megabytes": number(card, "size"),
        "smaller": None if base is None else _ratio(number(base, "size"), number(card, "size")),
        "ms": number(card, "latency"),
        "faster": None if base is None else _ratio(number(base, "latency"), number(card, "latency")),
        "parameters": number(card, "parameters"),
        "left": None if left is None else left.layers,
    }
    cells = {key: NONE if number_ is None else _TEXT[key](number_) for key, number_ in numbers.items()}
    cells["left"] = NONE if left is None else str(left)
    cells["seeds"] = str(runs["n"]) if runs["ok"] == runs["n"] else f"{runs['ok']} of {runs['n']}"
    if value is not None and error is not None:
        cells["score"] += f" ± {error:.1f}"
    if is_baseline:
        cells["versus"] = "baseline"
    cells |= {"task": card["task"], "model": name, "status": status_of(card)}
    order = {key: float("-inf") if number_ is None else number_ for key, number_ in numbers.items()}
    words = {"task": card["task"], "model": name, "status": cells["status"]}
    paths = {"score": "scores", "megabytes": "bytes.total", "ms": "latency.p50_ms", "parameters": "parameters.total"}
    reasons = {key: reason(card, path) or "no reason is given" for key, path in paths.items() if numbers[key] is None}
    return Row(cells, order | words, card, is_baseline, reasons)


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def three_digits(value: float) -> str:
    """A number with one decimal, more below 1 and none from 100 on.

    >>> three_digits(0.1234), three_digits(23.14), three_digits(1234.7)
    ('0.123', '23.1', '1,235')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"


def _times(value: float) -> str:
    return f"{value:.1f}x" if value >= 0.95 else f"{value:.2f}x"


def _parameters(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{three_digits(value / size)} {unit}"
    return f"{value:.0f}"


_TEXT: dict[str, Any] = {
    "score": lambda value: f"{value:.1f}",
    "seeds": str,
    "versus": lambda value: f"{round(value, 1) + 0.0:+.1f}",  # and not -0.0
    "megabytes": lambda value: three_digits(value / 1e6),
    "smaller": lambda value: _times(value),
    "ms": three_digits,
    "faster": lambda value: _times(value),
    "parameters": _parameters,
    "left": str,
}
