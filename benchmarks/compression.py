"""Compression against accuracy: every student of a study of students.sh beside the same student without a teacher.

    python benchmarks/compression.py results/students/e5-small/sst2 results/students/all-mpnet-base-v2/sst2

Prints what per cent of the teacher's score a student keeps, with how many times fewer parameters (zeros are not
counted; by the first folder that has it), and what it keeps when it learned without the teacher; and draws both into
compression.png of each folder: dots learned from the teacher, with a line of one standard deviation up and down where
there are several seeds; circles did not (▾ those far below). A run is compared with the teacher of its own seed. Means
over seeds, ± the standard deviation and their number where there are several; runs that learned nothing count with the
score they have, and † says how many those are.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from cells import to_cell

from smallbert.features.store import many
from smallbert.measuring.shelf import load_cards
from smallbert.report.figure import COLOURS, font_name, new_figure, strip_frame, to_png
from smallbert.report.plot import Box, move_label, place_labels

KEPT: dict[float, str] = {98: "98 %, the aim at 4x", 95: "95 %, at 8x"}  # of the teacher's score
CONTROL = ", alone"
FEWER = "times fewer parameters than the teacher, zeros not counted"
MARKS = [("● learned from the teacher", "accent", 0.81), ("○ the same without it", "muted", 1.0)]  # and where they end


class Kept(NamedTuple):
    """What share of its teacher's score the run of each seed keeps, and how many of these runs learned nothing."""

    shares: list[float]
    lost: int

    @property
    def mean(self) -> float:
        """Over all of them."""
        return mean(self.shares)

    def __str__(self) -> str:
        return to_cell(self.shares, self.lost)


class Student(NamedTuple):
    """One preset: how many times smaller, and what it keeps, taught and alone."""

    name: str
    times: float
    taught: Kept
    alone: Kept


def read_students(folder: Path) -> list[Student]:
    """The students of one study, largest first."""
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    lost: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, list[int]] = defaultdict(list)
    for card in load_cards(folder) if folder.is_dir() else ():
        if card["scores"]:
            scores[card["preset"]][card["seed"]] = card["scores"][card["headline"]]["value"]
            sizes[card["preset"].removesuffix(CONTROL)].append(card["parameters"]["non_zero"])
        if card["status"] != "ok":
            lost[card["preset"]].add(card["seed"])
    if "teacher" not in scores or len(sizes) == 1:
        raise SystemExit(
            f"{folder} has no run called teacher, or no other beside it; give a folder of a study of students.sh"
        )

    def kept(name: str) -> Kept:
        own, best = scores.get(name, {}), scores["teacher"]
        seeds = sorted(own.keys() & best.keys())
        return Kept([100 * own[seed] / best[seed] for seed in seeds], len(lost[name].intersection(seeds)))

    whole = mean(sizes.pop("teacher"))
    found = [Student(name, whole / mean(own), kept(name), kept(name + CONTROL)) for name, own in sizes.items()]
    return sorted(found, key=lambda student: student.times)


def guessed(folder: Path) -> float:
    """What per cent of its teacher's score one gets who always gives one answer."""
    cards = [card for card in load_cards(folder) if card["preset"] == "teacher"]
    return mean(100 * card["chance"] / card["scores"][card["headline"]]["value"] for card in cards)


def draw(
    students: Sequence[Student], title: str, guess: float, axis: str = FEWER, aims: Mapping[float, str] = KEPT
) -> object:
    """Share of the teacher's score against times fewer or faster, a name at each dot, and a line for a `guess`."""
    figure = new_figure((9.2, 5.6))
    axes = figure.add_axes((0.06, 0.1, 0.92, 0.82))
    axes.set_xscale("log")
    strip_frame(axes, "y", title)
    for student in students:
        taught = student.taught.mean
        if student.alone.shares:
            alone = student.alone.mean
            axes.plot([student.times] * 2, [taught, alone], color=COLOURS["rule"], zorder=1)
            look = {"markerfacecolor": COLOURS["paper"], "markersize": 5, "zorder": 3}
            axes.plot(student.times, alone, "o", color=COLOURS["muted"], **look)
        if len(student.taught.shares) > 1:
            spread = stdev(student.taught.shares)
            axes.plot([student.times] * 2, [taught - spread, taught + spread], color=COLOURS["accent"], linewidth=1.1)
        axes.plot(student.times, taught, "o", color=COLOURS["accent"], markersize=6, zorder=4)
    ticks = [times for times in (1, 1.5, 2, 3, 4, 6, 8, 12, 20, 40, 60, 100, 200) if times <= 1.3 * students[-1].times]
    axes.set_xticks(ticks, [f"{times:g}x" for times in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.9, 1.5 * students[-1].times)
    axes.set_xlabel(axis, fontsize=9.5, color=COLOURS["ink"])
    for said, colour, place in MARKS:
        axes.text(place, 1.025, said, color=COLOURS[colour], fontsize=9.5, ha="right", transform=axes.transAxes)
    axes.yaxis.get_major_locator().set_params(integer=True)
    _cut_below(axes, students)
    lines = {share: (said, 1.0, "right") for share, said in aims.items()}
    if guess > axes.get_ylim()[0]:
        lines[guess] = (f"{guess:.1f} %, always one answer", 0.0, "left")
    for share, (said, place, side) in lines.items():
        axes.axhline(share, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
        look = {"color": COLOURS["muted"], "fontsize": 8.5, "ha": side, "va": "bottom"}
        axes.text(place, share, said, transform=axes.get_yaxis_transform(), **look)
    _name(figure, axes, students, list(aims))
    return figure


def _cut_below(axes: object, students: Sequence[Student]) -> None:
    """Leave controls that are far below all students out of sight, with a sign of how far down they are."""
    low, high = axes.get_ylim()  # type: ignore[attr-defined]
    floor = max(low, min(student.taught.mean for student in students) - 8)
    axes.set_ylim(floor, high)  # type: ignore[attr-defined]
    look = {"color": COLOURS["muted"], "fontsize": 8.5, "ha": "left", "va": "bottom"}
    for student in students:
        if student.alone.shares and student.alone.mean < floor:
            axes.text(student.times, floor, f" ▾ {student.alone.mean:.0f}", **look)  # type: ignore[attr-defined]


def _name(figure: object, axes: object, students: Sequence[Student], aims: Sequence[float]) -> None:
    renderer, pixels = figure.canvas.get_renderer(), axes.transData.transform  # type: ignore[attr-defined]
    look = {"fontsize": 8.5, "fontfamily": font_name(), "color": COLOURS["ink"]}
    texts = [axes.annotate(s.name, (s.times, s.taught.mean), **look) for s in students]  # type: ignore[attr-defined]
    sizes = [(e.width * 1.04, e.height) for e in (text.get_window_extent(renderer) for text in texts)]
    anchors = [tuple(map(float, pixels((s.times, s.taught.mean)))) for s in students]
    controls = [pixels((s.times, s.alone.mean)) for s in students if s.alone.shares]
    circles = [Box(x - 4, y - 4, x + 4, y + 4) for x, y in controls]
    inner = axes.get_window_extent(renderer)  # type: ignore[attr-defined]
    frame = Box(inner.x0, inner.y0, inner.x1, inner.y1)
    lines = [_spread_box(student, pixels) for student in students if len(student.taught.shares) > 1]
    heights = [pixels((1, share))[1] for share in aims]
    lines += [Box(inner.x0, y - 1, inner.x1, y + 1) for y in heights]
    boxes = place_labels(anchors, sizes, lines, frame, circles)  # type: ignore[arg-type]
    for text, box, anchor in zip(texts, boxes, anchors, strict=True):
        move_label(figure, axes, text, box, anchor)  # type: ignore[arg-type]


def _spread_box(student: Student, pixels: Callable[[tuple[float, float]], Sequence[float]]) -> Box:
    middle, spread = student.taught.mean, stdev(student.taught.shares)
    x, low = pixels((student.times, middle - spread))
    return Box(x - 2, low, x + 2, pixels((student.times, middle + spread))[1])


def to_table(folders: Sequence[Path]) -> list[str]:
    """One line a student, two columns a folder, as docs/distillation.md has it."""
    found = {folder: {student.name: student for student in read_students(folder)} for folder in folders}
    sizes = {name: one.times for students in reversed(found.values()) for name, one in students.items()}
    lines = ["| preset | fewer parameters |" + "".join(f" {folder.name} | alone |" for folder in folders)]
    lines.append("|---|---|" + "---|---|" * len(folders))
    for name in sorted(sizes, key=lambda name: sizes[name]):
        of = [students.get(name) for students in found.values()]
        cells = [cell for one in of for cell in ((str(one.taught), str(one.alone)) if one else ("", ""))]
        lines.append(f"| `{name}` | {sizes[name]:.1f}x | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print all folders, draw each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    folders = parser.parse_args().folders
    print("\n".join(to_table(folders)))
    for folder in folders:
        path = folder / "compression.png"
        drawn = [student for student in read_students(folder) if student.taught.shares]
        counts = {len(student.taught.shares) for student in drawn}
        seeds = many(max(counts), "seed") if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"
        title = f"% of the teacher's score, {folder.parent.name}, {folder.name}, {seeds}"
        to_png(draw(drawn, title, guessed(folder)), path)  # type: ignore[arg-type]
        print(f"drawn in {path}")


if __name__ == "__main__":
    main()
