"""What few bits cost: every arm of the studies of quantisation.sh against the same model in float32.

    python benchmarks/bits.py results/quantisation/e5-small/{sst2,mrpc,qqp,squad}

Prints a line an arm: the model's file in MB and how many times smaller it is, embeddings and all (of the first folder
that has it), and for each folder by how many points the score differs from that of the float32 model of the same seed:
the mean over seeds, ± their standard deviation and their number where there are several. † says how many of them
learned nothing, or lost what they had learned; they count with the score they have.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from cells import to_cell

from smallbert.measuring.shelf import load_cards

DENSE = "float32"


class Arm(NamedTuple):
    """One way to store a model: how large it is, what it costs on each seed, and how many runs learned nothing."""

    megabytes: float
    times: float
    costs: list[float]
    lost: int

    def __str__(self) -> str:
        return to_cell(self.costs, self.lost, "+.1f")


def read_arms(folder: Path) -> tuple[float, dict[str, Arm]]:
    """The float32 model's mean score, and what each arm costs."""
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    sizes: dict[str, list[int]] = defaultdict(list)
    lost: dict[str, int] = defaultdict(int)
    for card in load_cards(folder) if folder.is_dir() else ():
        if card["scores"]:
            scores[card["preset"]][card["seed"]] = card["scores"][card["headline"]]["value"]
            sizes[card["preset"]].append(card["bytes"]["total"])
            lost[card["preset"]] += card["status"] != "ok"
    if len(scores) < 2 or DENSE not in scores:
        raise SystemExit(f"{folder} has no run called {DENSE}, or no other beside it; give one of quantisation.sh")
    dense, found = scores[DENSE], {}
    for name, own in scores.items():
        if costs := [own[seed] - dense[seed] for seed in sorted(own.keys() & dense.keys())]:
            found[name] = Arm(mean(sizes[name]) / 1e6, mean(sizes[DENSE]) / mean(sizes[name]), costs, lost[name])
    return mean(dense.values()), found


def to_table(folders: Sequence[Path]) -> list[str]:
    """One line an arm, one column a folder, as docs/quantisation.md has it."""
    found = {folder: read_arms(folder) for folder in folders}
    sizes = {name: arm for _, arms in reversed(found.values()) for name, arm in arms.items()}
    whole = [f"{score:.1f}" for score, _ in found.values()]
    lines = [
        f"| | MB | times smaller | {' | '.join(folder.name for folder in folders)} |",
        "|---" * (3 + len(found)) + "|",
    ]
    lines.append(f"| {DENSE} | {sizes[DENSE].megabytes:.1f} | 1.0x | {' | '.join(whole)} |")
    for name in sorted(sizes.keys() - {DENSE}, key=lambda name: -sizes[name].megabytes):
        cells = [
            to_cell(arms[name].costs, arms[name].lost, "+.1f") if name in arms else "" for _, arms in found.values()
        ]
        lines.append(f"| {name} | {sizes[name].megabytes:.1f} | {sizes[name].times:.1f}x | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table of some folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    print("\n".join(to_table(parser.parse_args().folders)))


if __name__ == "__main__":
    main()
