"""The picture of two models: every example as a dot, how good A's answer to it is against how good B's is."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from smallbert.report.figure import COLOURS, font_name, new_figure, strip_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (5.6, 6.1)  # inches
GRID = 100  # places on an axis; examples that share one are one dot, the larger the more they are
DOT, LEAST, LARGEST = 16.0, 3.0, 400.0  # points²: a dot of one example, the least of it where there are many, the most
MANY = 500  # examples; with more of them each gets a smaller dot
AXES = {
    "classify": "{side}'s probability of the true class",
    "regress": "{side}'s distance from the truth",
    "tag": "share of words that {side} gets right",
    "answer": "F1 of {side}'s answers",
}


def draw(found: dict[str, Any]) -> "Figure":
    """Dots above the diagonal are examples that B does better on, below it A; their colour says who is right."""
    figure = new_figure(SIZE)
    axes = figure.add_axes((0.6 / SIZE[0], 0.62 / SIZE[1], 4.7 / SIZE[0], 4.7 / SIZE[1]))
    most = _largest(found)
    axes.plot([0, most], [0, most], color=COLOURS["rule"], linewidth=1, zorder=1)
    if len(found["labels"]) == 2 and found["kind"] == "classify":  # only of two classes is the likelier above one half
        for line in (axes.axhline, axes.axvline):
            line(0.5, color=COLOURS["rule"], linewidth=1, zorder=1)
    _dots(axes, found, most)
    reach = 0.03 * most
    axes.set_xlim(-reach, most + reach)
    axes.set_ylim(-reach, most + reach)
    strip_frame(axes, None)
    axes.tick_params(labelfontfamily=font_name())
    axes.spines["bottom"].set_color(COLOURS["muted"])
    look: dict[str, Any] = {"fontsize": 9.5, "color": COLOURS["ink"], "fontfamily": font_name()}
    axes.set_xlabel(AXES[found["kind"]].format(side="A"), labelpad=6, **look)
    axes.set_ylabel(AXES[found["kind"]].format(side="B"), labelpad=6, **look)
    names = (model["name"] if len(model["name"]) < 32 else f"{model['name'][:31]}…" for model in found["models"])
    title = "A {}, B {}: ".format(*names) + f"{found['task']}, {found['split']}"
    figure.text(0.6 / SIZE[0], 1 - 0.3 / SIZE[1], title, **look | {"fontsize": 10.5})
    return figure


def _largest(found: dict[str, Any]) -> float:
    if found["kind"] != "regress":
        return 1.0
    return max(max(-one["a_good"], -one["b_good"]) for one in found["predictions"]) or 1.0


def _dots(axes: "Axes", found: dict[str, Any], most: float) -> None:
    """All examples, in the colours of who is right, with a legend that counts them."""
    sign, places = (-1 if found["kind"] == "regress" else 1), Counter[tuple[str, int, int]]()
    for one in found["predictions"]:
        x, y = (round(sign * one[side] / most * GRID) for side in ("a_good", "b_good"))
        places[_group(one, found["kind"]), x, y] += 1
    each = DOT * min(1.0, MANY / len(found["predictions"]))
    groups = _GROUPS["regress" if found["kind"] == "regress" else "right"]
    for group, (title, colour, alpha) in groups.items():
        dots = [
            (x * most / GRID, y * most / GRID, count) for (name, x, y), count in sorted(places.items()) if name == group
        ]
        count = sum(count for *_, count in dots)
        if group == "equal" and not count:
            continue
        xs, ys, counts = zip(*dots, strict=True) if dots else ((), (), ())
        sizes = [min(max(each * count, LEAST), LARGEST) for count in counts]
        axes.scatter(xs, ys, sizes, color=COLOURS[colour], alpha=alpha, linewidths=0, zorder=2, clip_on=False)
        axes.plot([], [], "o", color=COLOURS[colour], alpha=alpha, markersize=5, label=f"{title} {count:,}")
    axes.legend(
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=len(groups),
        handletextpad=0.1,
        columnspacing=1.1,
        prop={"family": font_name(), "size": 9},
        labelcolor=COLOURS["ink"],
    )


def _group(one: dict[str, Any], kind: str) -> str:
    if kind == "regress":
        return "a" if one["a_good"] > one["b_good"] else "b" if one["b_good"] > one["a_good"] else "equal"
    return f"{one['a_right']:d}{one['b_right']:d}"


_GROUPS: dict[str, dict[str, tuple[str, str, float]]] = {  # title, colour, how solid
    "right": {
        "11": ("both right", "muted", 0.35),
        "00": ("neither", "ink", 0.6),
        "10": ("only A", "accent", 0.75),
        "01": ("only B", "other", 0.75),
    },
    "regress": {
        "equal": ("equal", "muted", 0.35),
        "a": ("A nearer", "accent", 0.55),
        "b": ("B nearer", "other", 0.55),
    },
}
