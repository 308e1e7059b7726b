"""The picture of a search: each trial's score, the best so far, and scores against the settings that matter most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smallbert.report.figure import COLOURS, new_figure, strip_frame
from smallbert.tuning.records import OK, PRUNED, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SLICES = 4  # settings that are shown
SPREAD = 0.16  # by which trials of one value stand apart
WIDE, TALL = 9.0, 5.6  # inches


def draw(result: dict[str, Any], records: Sequence[Record]) -> Figure:
    """Draw all trials above, and the most important settings below."""
    figure = new_figure((WIDE, TALL))
    seen = [one for one in records if one.score is not None]
    _draw_trials(figure.add_axes((0.07, 0.56, 0.9, 0.36)), result, records, seen)
    choices = {one["name"]: one for one in result["choices"]}
    names = [*result["importances"], *(name for name in choices if name not in result["importances"])][:SLICES]
    low, high = _limits(seen)
    for place, name in enumerate(names):
        room = 0.9 / len(names)
        axes = figure.add_axes((0.07 + place * room, 0.1, room - 0.035, 0.32))
        _draw_slice(axes, choices[name], seen, result)
        axes.set_ylim(low, high)
        if place:
            axes.set_yticklabels([])
    return figure


def _draw_trials(axes: Axes, result: dict[str, Any], records: Sequence[Record], seen: Sequence[Record]) -> None:
    _dots(axes, [(float(one.trial), one) for one in seen])
    low, high = _limits(seen)
    bad = [one.trial for one in records if one.is_done and one.score is None]
    if bad:
        axes.plot(bad, [low] * len(bad), "x", color=COLOURS["muted"], markersize=5, clip_on=False)
    steps: list[tuple[int, float]] = []
    for one in seen:
        if one.status == OK and one.score is not None and (not steps or one.score > steps[-1][1]):
            steps.append((one.trial, one.score))
    if steps:
        last = max(one.trial for one in records)
        axes.step([x for x, _ in steps] + [last], [y for _, y in steps] + [steps[-1][1]], where="post",
                  color=COLOURS["accent"], linewidth=1.6, zorder=4)  # fmt: skip
    default = result["default"]
    if default is not None and default["score"] is not None:
        axes.axhline(default["score"], color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
        axes.text(1.0, default["score"], "default", transform=axes.get_yaxis_transform(), ha="right", va="bottom",
                  fontsize=8, color=COLOURS["muted"])  # fmt: skip
    axes.set_ylim(low, high)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("trial", fontsize=8, color=COLOURS["muted"])
    strip_frame(axes, "y", f"{result['task']}, {result['metric']} on rows held out of train, trial by trial")
    note = "line: best so far, dots: trained to the end" + (", rings: pruned" if _has(seen, PRUNED) else "")
    axes.set_title(note + (", x: no score" if bad else ""), loc="right", fontsize=8.5, color=COLOURS["muted"])


def _draw_slice(axes: Axes, choice: dict[str, Any], seen: Sequence[Record], result: dict[str, Any]) -> None:
    """Scores against the values of one setting."""
    name, values = choice["name"], choice.get("values")
    met = [one for one in seen if name in one.drawn]
    if values:
        groups: dict[str, int] = {}
        places = []
        for one in met:
            count = groups[one.drawn[name]] = groups.get(one.drawn[name], -1) + 1
            aside = ((count * 7) % 11 / 5 - 1) * SPREAD  # spread evenly, and the same each time
            places.append((values.index(one.drawn[name]) + aside, one))
        axes.set_xticks(range(len(values)), [value if len(value) < 11 else f"{value[:10]}…" for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
    else:
        places = [(float(one.drawn[name]), one) for one in met]
        low, high = choice["low"], choice["high"]
        if logarithmic := choice["kind"].endswith("log"):
            axes.set_xscale("log")
            axes.minorticks_off()
        ticks = [low, math.sqrt(low * high) if logarithmic else (low + high) / 2, high]
        axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        air = (high / low) ** 0.05 if logarithmic else 0.05 * (high - low)
        axes.set_xlim((low / air, high * air) if logarithmic else (low - air, high + air))
    _dots(axes, places, result["best"] and result["best"]["trial"])
    share = result["importances"].get(name)
    strip_frame(axes, "y", name, labels=8)
    if share is not None:
        axes.set_xlabel(f"explains {100 * share:.0f} %", fontsize=8, color=COLOURS["muted"])


def _dots(axes: Axes, places: Sequence[tuple[float, Record]], best: int | None = None) -> None:
    for x, one in places:
        role = "accent" if one.trial == best else "ink"
        full = COLOURS[role] if one.status == OK else "none"
        look: dict[str, Any] = {"markerfacecolor": full, "markeredgecolor": COLOURS[role], "markeredgewidth": 0.8}
        size, alpha = (6.5, 1.0) if role == "accent" else (4.2, 0.45)
        axes.plot(x, one.score or 0.0, "o", markersize=size, alpha=alpha, zorder=5 if role == "accent" else 3, **look)


def _has(records: Sequence[Record], status: str) -> bool:
    return any(one.status == status for one in records)


def _limits(seen: Sequence[Record]) -> tuple[float, float]:
    """From the lowest to the highest score, with some air."""
    scores = [one.score or 0.0 for one in seen]
    air = 0.08 * (max(scores) - min(scores)) or 1.0
    return min(scores) - air, max(scores) + air
