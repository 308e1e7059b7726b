"""The plots: cost against score, drawn once for the page (SVG that follows light and dark) and for files (PNG)."""

import html
import io
import math
import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from smallbert.report.figure import COLOURS, font_name, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FROM = 4.0  # a logarithmic axis where the largest is more than so many times the smallest
NEAR = 11.0  # pixels; a label farther from its point is joined to it by a line
MANY = 14  # with more points than this only those on the frontier are named
WIDE, NARROW = (7.6, 4.7), (3.9, 4.3)  # inches: a page's column, a phone


class Point(NamedTuple):
    """One model in a plot; `error` is half the length of its error bar."""

    name: str
    x: float
    y: float
    error: float
    on_frontier: bool = False
    is_best: bool = False
    is_baseline: bool = False


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        """The area two rectangles share."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.top, other.top) - max(self.bottom, other.bottom)
        return wide * high if wide > 0 and high > 0 else 0.0


def draw(
    points: Sequence[Point],
    x_title: str,
    y_title: str,
    inches: tuple[float, float] = WIDE,
    limit: tuple[float, str] | None = None,
) -> "Figure":
    """Draw points with error bars, the frontier, a name at each point, and the budget's limit on x if there is one."""
    figure = new_figure(inches)
    axes = figure.add_axes((0.42 / inches[0], 0.62 / inches[1], 1 - 0.6 / inches[0], 1 - 1.12 / inches[1]))
    _frame(axes, points, x_title, y_title)
    line = _staircase(points)
    if line:
        axes.plot(*zip(*line, strict=True), color=COLOURS["accent"], linewidth=1.2, alpha=0.45, zorder=2)
    for place, point in enumerate(points):
        colour = COLOURS["accent"] if point.on_frontier or point.is_best else COLOURS["muted"]
        low, high = point.y - point.error, point.y + point.error
        axes.plot([point.x, point.x], [low, high], color=colour, linewidth=1.1, alpha=0.5, zorder=3)
        size = 9.5 if point.is_best else 6.5
        [dot] = axes.plot(
            point.x, point.y, "o", color=colour, markersize=size, markeredgecolor=COLOURS["paper"], zorder=4
        )
        dot.set_gid(f"point-{place}")
    shown = limit and axes.get_xlim()[0] < limit[0] < axes.get_xlim()[1]
    lines, words = _draw_limit(axes, *limit) if limit and shown else ([], [])
    _draw_labels(figure, axes, points, lines, words)
    return figure


def _staircase(points: Sequence[Point]) -> list[tuple[float, float]]:
    """The corners of the frontier: level until a better model starts, then up to it."""
    line = sorted((point.x, point.y) for point in points if point.on_frontier)
    corners = line[:1]
    for x, y in line[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return corners


def to_svg(figure: "Figure", points: Sequence[Point], prefix: str, about: str) -> str:
    """A figure as SVG to stand inside a page: its colours are the page's, its ids start with `prefix`."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*"', r"\1", svg, count=2)
    svg = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    svg = re.sub(
        r"font: ([\w ]*?)([\d.]+)px '[^;\"]*", r"font: \1\2px var(--sans)", svg
    )  # as matplotlib 3.10 writes it
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", svg)
    for role, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{role})")
    for place, point in enumerate(points):
        told = html.escape(f"{point.name}: {point.y:.1f} ± {point.error:.1f}")
        svg = svg.replace(f'<g id="{prefix}-point-{place}">', f'<g id="{prefix}-point-{place}"><title>{told}</title>')
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(about)}" ', 1)


def place_labels(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    taken: Sequence[Box],
    frame: Box,
    words: Sequence[Box] = (),
) -> list[Box]:
    """Where to write a label of each size near its anchor: not over others, points or `words`, seldom over `taken`.

    >>> place_labels([(50, 50)], [(20, 10)], [], Box(0, 0, 100, 100))
    [Box(left=57, bottom=45.0, right=77, top=55.0)]
    """
    dots = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]
    solid = [*dots, *words]
    placed: list[Box | None] = [None] * len(anchors)
    for _ in range(4):  # the first round places each after the others before it, the later ones give way
        before = list(placed)
        for place, (anchor, size) in enumerate(zip(anchors, sizes, strict=True)):
            others = [box for other, box in enumerate(placed) if other != place and box is not None]
            choices = _choices(anchor, size)
            costs = []
            for box, far in choices:
                outside = (box.right - box.left) * (box.top - box.bottom) - box.overlap(frame)
                covered = sum(map(box.overlap, others)) + sum(map(box.overlap, solid))
                crossed = sum(_crosses(anchor, box, other) for other in (*others, *dots[:place], *dots[place + 1 :]))
                lines = sum(map(box.overlap, taken))
                costs.append(outside * 50 + covered * 20 + lines + crossed * 60 + far)
            placed[place] = choices[costs.index(min(costs))][0]
        if placed == before:
            break
    return [box for box in placed if box is not None]


def _nearest(anchor: tuple[float, float], box: Box) -> tuple[float, float]:
    """The point of a box nearest to an anchor, where the line between them ends."""
    return min(max(anchor[0], box.left), box.right), min(max(anchor[1], box.bottom), box.top)


def _crosses(anchor: tuple[float, float], box: Box, other: Box) -> bool:
    """Whether the line from an anchor to its label runs through another box, looked at in eight places."""
    (x, y), (u, v) = anchor, _nearest(anchor, box)
    if math.dist((x, y), (u, v)) <= NEAR:
        return False
    along = [(x + (u - x) * part / 8, y + (v - y) * part / 8) for part in range(1, 9)]
    return any(other.left < a < other.right and other.bottom < b < other.top for a, b in along)


_ANGLES = (
    (0, 0),
    (180, 3),
    (90, 4),
    (270, 5),
    *((angle, 6) for angle in (25, 45, 65, 115, 135, 155, 205, 225, 245, 295, 315, 335)),
)


def _choices(anchor: tuple[float, float], size: tuple[float, float]) -> list[tuple[Box, float]]:
    """Places around an anchor, each with a cost that grows with its distance; beside the point is best."""
    (x, y), (wide, high) = anchor, size
    choices = []
    for far in (7, 10, 14, 20, 28, 38, 50, 64, 80, 98):
        for angle, dislike in _ANGLES:
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            left = x + far * across - wide * (1 - across) / 2
            bottom = y + far * up - high * (1 - up) / 2
            choices.append((Box(left, bottom, left + wide, bottom + high), far * 1.5 + dislike))
    return choices


def _frame(axes: "Axes", points: Sequence[Point], x_title: str, y_title: str) -> None:
    """Axes as a newspaper draws them: level rules only, titles written level at the ends."""
    xs = [point.x for point in points]
    low, high = min(point.y - point.error for point in points), max(point.y + point.error for point in points)
    room = max((high - low) * 0.1, 0.5)
    axes.set_ylim(low - room, high + room)
    axes.locator_params(axis="y", nbins=6)
    if max(xs) > LOG_FROM * min(xs) > 0:
        axes.set_xscale("log")
        space = (max(xs) / min(xs)) ** 0.12
        axes.set_xlim(min(xs) / space, max(xs) * space)
        axes.set_xticks(_log_ticks(min(xs) / space, max(xs) * space), minor=False)
        axes.set_xticks([], minor=True)
    else:
        space = max((max(xs) - min(xs)) * 0.12, max(xs) * 0.05, 1e-9)
        axes.set_xlim(min(xs) - space, max(xs) + space)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_facecolor("none")
    axes.grid(axis="y", color=COLOURS["rule"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["ink"])
    axes.tick_params(axis="both", colors=COLOURS["muted"], labelsize=9, length=0, pad=5)
    axes.tick_params(axis="x", length=4, color=COLOURS["ink"])
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_fontfamily(font_name())
    written: dict[str, Any] = {"color": COLOURS["ink"], "fontsize": 9.5, "fontfamily": font_name()}
    axes.annotate(y_title, (0, 1), (-27, 14), xycoords="axes fraction", textcoords="offset points", **written)
    below: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate(x_title, (1, 0), (0, -24), **below, **written)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers within the range, so fine that there are at most eight of them."""
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**ten for ten in tens for step in steps if low <= step * 10.0**ten <= high]
        if len(ticks) <= 8:
            break
    return ticks


def _draw_limit(axes: "Axes", value: float, text: str) -> tuple[list[Box], list[Box]]:
    """Draw the budget's limit and give the boxes of its line, and of its words."""
    axes.axvline(value, color=COLOURS["ink"], linewidth=0.9, linestyle=(0, (3, 3)), alpha=0.6, zorder=1)
    spot: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
    look: dict[str, Any] = {"fontsize": 8.5, "fontfamily": font_name(), "color": COLOURS["ink"], "style": "italic"}
    written = axes.annotate(text, (value, 1), (-4, 2), ha="right", **spot, **look)
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    inner, x = axes.get_window_extent(renderer), float(axes.transData.transform((value, 1))[0])
    words = written.get_window_extent(renderer)
    return [Box(x - 1, inner.y0, x + 1, inner.y1)], [Box(words.x0, words.y0, words.x1, words.y1)]


def _draw_labels(figure: "Figure", axes: "Axes", points: Sequence[Point], taken: list[Box], words: list[Box]) -> None:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    few = len(points) <= MANY and figure.get_figwidth() >= WIDE[0]
    named = [point for point in points if few or point.on_frontier or point.is_best or point.is_baseline]
    named.sort(key=lambda point: (not point.is_best, not point.on_frontier))
    wrap, lines = (26, 2) if few else (18, 3)
    texts = []
    for point in named:
        colour = COLOURS["accent"] if point.is_best else COLOURS["ink"] if point.on_frontier else COLOURS["muted"]
        look: dict[str, Any] = {"fontsize": 9, "color": colour, "fontweight": "bold" if point.is_best else "normal"}
        name = re.sub(r"([|+]) ", "\\1\u00a0", point.name)  # a line starts with the sign, it does not end with it
        written = "\n".join(textwrap.wrap(name, wrap, max_lines=lines, placeholder=" …", break_on_hyphens=False))
        texts.append(
            axes.annotate(
                written, (point.x, point.y), fontfamily=font_name(), linespacing=1.1, parse_math=False, **look
            )
        )
    sizes = []
    for text in texts:
        extent = text.get_window_extent(renderer)
        sizes.append((extent.width * 1.06, extent.height + 2))  # room for a reader's font that runs wider than ours
    pixels = axes.transData.transform
    taken = taken + [_around(pixels((p.x, p.y - p.error)), pixels((p.x, p.y + p.error)), 2) for p in points]
    taken += [_around(pixels((p.x, p.y)), pixels((p.x, p.y)), 5) for p in points if p not in named]
    corners = pixels(_staircase(points) or [(1, 1)])
    taken += [_around(one, other, 1) for one, other in pairwise(corners)]
    inner = axes.get_window_extent(renderer)
    frame = Box(inner.x0, inner.y0 + 2, figure.bbox.x1 - 4, inner.y1 + 6)
    anchors = [(float(x), float(y)) for x, y in (pixels((p.x, p.y)) for p in named)]
    for text, box, anchor in zip(texts, place_labels(anchors, sizes, taken, frame, words), anchors, strict=True):
        move_label(figure, axes, text, box, anchor)


def _around(one: Any, other: Any, room: float) -> Box:
    """The box around two points in pixels, with room on all sides."""
    (a, b), (c, d) = one, other
    return Box(min(a, c) - room, min(b, d) - room, max(a, c) + room, max(b, d) + room)


def move_label(figure: "Figure", axes: "Axes", text: Any, box: Box, anchor: tuple[float, float]) -> None:
    """Put a label into its box, on the side that faces its point, with a thin line where it had to go far."""
    x, y = anchor
    side = "left" if box.left > x else "right" if box.right < x else "center"
    text.set_horizontalalignment(side)
    text.set_verticalalignment("center")
    at = {"left": box.left, "right": box.right, "center": (box.left + box.right) / 2}[side]
    middle = (box.bottom + box.top) / 2
    scale = 72 / figure.dpi
    text.set_position(((at - x) * scale, (middle - y) * scale))
    text.anncoords = "offset points"
    near = _nearest(anchor, box)
    if math.dist(near, anchor) > NEAR:
        ends = axes.transData.inverted().transform([anchor, near])
        axes.plot(ends[:, 0], ends[:, 1], color=COLOURS["muted"], linewidth=0.6, alpha=0.7, zorder=1)
