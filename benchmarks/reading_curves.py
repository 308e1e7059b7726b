"""How fast models learn to guess hidden words: the loss that `watch` wrote down, step by step, arm beside arm.

    python benchmarks/reading_curves.py results/layer_mixing/pretraining

Prints the mean loss of a hidden word over seeds, ± the standard deviation, and after how many steps each arm is where
the first one ends; draws every run into curves.png of the folder. The loss is that of the same blocks and the same
hidden words at every look and in every run.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

from smallbert.measuring.shelf import load_cards
from smallbert.measuring.statistics import first_reached
from smallbert.report.convergence import LINES
from smallbert.report.figure import COLOURS, new_figure, strip_frame, to_png

STEPS = (500, 1000, 2000, 2500, 3000, 4000, 6000, 8000, 10000)  # in the table
Curve = dict[int, float]  # step -> loss


def read_curves(folder: Path) -> dict[str, dict[int, Curve]]:
    """The curves of each arm by seed, the arms as the study's page has them."""
    found: dict[str, dict[int, Curve]] = defaultdict(dict)
    for card in load_cards(folder):
        looks = card["trained"]["traces"]["watch"]
        found[card["preset"]][card["seed"]] = {look["step"]: look["value"]["loss"] for look in looks}
    return dict(sorted(found.items()))


def to_table(curves: dict[str, dict[int, Curve]]) -> Iterator[str]:
    """A row for some of the steps."""
    yield f"| steps | {' | '.join(curves)} |"
    yield "|---" * (1 + len(curves)) + "|"
    for step in STEPS:
        cells = [[curve[step] for curve in seeds.values()] for seeds in curves.values()]
        yield f"| {step:,} | {' | '.join(f'{mean(cell):.2f} ± {stdev(cell):.2f}' for cell in cells)} |"


def to_sentences(curves: dict[str, dict[int, Curve]]) -> Iterator[str]:
    """When each arm is, seed by seed, where the first arm ends."""
    first = next(iter(curves))
    for arm, seeds in curves.items():
        for seed, curve in sorted(seeds.items()):
            wanted = curves[first][seed]
            there = first_reached([(step, -loss) for step, loss in curve.items()], -wanted[max(wanted)])
            when = "never within the range" if there is None else f"after {there.x:,.0f} steps"
            yield f"seed {seed}: {arm} has the last loss of {first} ({wanted[max(wanted)]:.2f}) {when}"


def draw_curves(curves: dict[str, dict[int, Curve]], path: Path) -> None:
    """Every run as a line."""
    figure = new_figure((8.4, 4.2))
    axes = figure.add_axes((0.07, 0.13, 0.9, 0.77))
    for (arm, seeds), colour in zip(curves.items(), LINES, strict=False):
        for number, curve in enumerate(seeds.values()):
            label = arm if not number else None
            axes.plot(list(curve), list(curve.values()), color=colour, linewidth=1.3, alpha=0.85, label=label)
    axes.legend(frameon=False, fontsize=9)
    axes.set_xlabel("steps", fontsize=9.5, color=COLOURS["ink"])
    strip_frame(axes, "y", "loss of a hidden word, a line a seed")
    to_png(figure, path)


def main() -> None:
    """Print the table and the sentences, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    curves = read_curves(folder)
    print("\n".join([*to_table(curves), *to_sentences(curves)]))
    draw_curves(curves, folder / "curves.png")


if __name__ == "__main__":
    main()
