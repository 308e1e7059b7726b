"""What cards of pruning studies say beyond their tables: when models fall silent, where mixtures look, what cuts leave.

    python benchmarks/pruning_facts.py results/layer_mixing/pruning
    python benchmarks/pruning_facts.py results/layer_mixing/cures

Silent means that all texts that are watched get the same answer, for at least three looks. Steps and shares are those
of the first and the last silent look; shares are of all masked matrices.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.measuring.shelf import load_cards

LOOKS = 3
EARLY = 2500  # steps; the ramp of the pruning study begins at 2,105
MASS = 0.95  # of the mixture, in what a cut leaves
FIRST, LAST = 2, 4  # the layers whose share of the mixture is added up


def watch(card: dict[str, Any]) -> list[dict[str, Any]]:
    """What was written down while it trained, each with its step."""
    return [{"step": entry["step"], **entry["value"]} for entry in card["trained"]["traces"]["watch"]]


def accuracy(card: dict[str, Any]) -> float:
    """Its score on dev."""
    return card["scores"]["accuracy"]["value"]


def kept(look: dict[str, Any]) -> float:
    """The share of weights left: layers are of one size."""
    return float(np.mean(look["kept"]))


def silence(looks: list[dict[str, Any]]) -> str:
    """From when to when a model gave all watched texts one answer, and how much of it was left then."""
    told = []
    for same, group in groupby(looks, lambda look: look["largest"] == 100.0):
        spell = list(group)
        if same and len(spell) >= LOOKS:
            first, last = spell[0], spell[-1]
            told.append(f"steps {first['step']} to {last['step']}, {kept(first):.0%} to {kept(last):.0%} kept")
    return f"silent: {'; '.join(told)}" if told else "never silent"


def tell_of_cuts(cards: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Print, seed by seed, where the mixture looks and what its cut leaves and costs."""
    differences = {}
    for seed in sorted({seed for _, seed in cards}):
        mixed, cut = (cards[name, seed] for name in ("mixture", "mixture, cut"))
        shares = mixed["trained"]["mixture"]
        bare = next(number for number, below in enumerate(np.cumsum(shares)) if below >= MASS - 1e-6)
        macs = [card["macs"]["value"] for card in (mixed, cut)]
        same = watch(mixed) == watch(cut)  # a cut of the very run beside it, or of the same recipe trained again
        differences[seed] = (accuracy(cut) - accuracy(mixed), same)
        print(
            f"seed {seed}: layers {FIRST} to {LAST} hold {sum(shares[FIRST : LAST + 1]):.2f} of the mixture; cut: "
            f"{macs[0] / macs[1]:.1f}x fewer multiplications, {differences[seed][0]:+.2f}"
            f"{'' if same else ' (cut of another run of the same recipe)'}; by bare shares {bare} layers would stay"
        )
    every = list(differences.values())
    for name, chosen in (("all", [one for one, _ in every]), ("same run", [one for one, same in every if same])):
        error = np.std(chosen, ddof=1) / len(chosen) ** 0.5
        print(f"cut - mixture, {name}: {np.mean(chosen):+.2f} ± {error:.2f} ({len(chosen)} seeds)")


def early(looks: list[dict[str, Any]]) -> str:
    """How it does on the watched texts soon after the ramp has begun."""
    return "".join(f", {look['accuracy']:.0f} at step {EARLY}" for look in looks if look["step"] == EARLY)


def main() -> None:
    """Print every run, then what is asked of the study with cuts."""
    cards = {(card["preset"], card["seed"]): card for card in load_cards(Path(sys.argv[1]))}
    for (name, seed), card in sorted(cards.items()):
        begun = " (0.1.0)" if card["versions"]["smallbert"] == "0.1.0" else ""
        print(f"{name}, seed {seed}: {accuracy(card):.1f}, {silence(watch(card))}{early(watch(card))}{begun}")
    resumed = {json.dumps(watch(card)): "checkpoint" in str(card["trained"]["notes"]) for card in cards.values()}
    print(f"{sum(resumed.values())} of {len(resumed)} trainings went on from a checkpoint")
    if {"mixture", "mixture, cut"} <= {name for name, _ in cards}:
        tell_of_cuts(cards)


if __name__ == "__main__":
    main()
