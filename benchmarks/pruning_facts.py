"""What cards of pruning studies say beyond their tables: when models are lost, where mixtures look, what cuts leave.

    python benchmarks/pruning_facts.py results/layer_mixing/pruning
    python benchmarks/pruning_facts.py results/layer_mixing/cures

Lost means that the pull of the loss on the first layer's output falls below 1e-6 after the ramp has begun; silent, that
all texts that were watched got the same answer, for at least three looks.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.measuring.shelf import load_cards

LOST = 1e-6
LOOKS = 3
FIRST, LAST = 2, 4  # the layers whose share of the mixture is added up


def watch(card: dict[str, Any]) -> list[dict[str, Any]]:
    """What was written down while it trained, each with its step."""
    return [{"step": entry["step"], **entry["value"]} for entry in card["trained"]["traces"]["watch"]]


def accuracy(card: dict[str, Any]) -> float:
    """Its score on dev."""
    return card["scores"]["accuracy"]["value"]


def silence(looks: list[dict[str, Any]]) -> str:
    """From when to when a model gave all watched texts one answer, and how much of it was left then."""
    told = []
    for same, group in groupby(looks, lambda look: look["largest"] == 100.0):
        spell = list(group)
        if same and len(spell) >= LOOKS:
            steps, kept = ([spell[place][what] for place in (0, -1)] for what in ("step", "kept"))
            told.append(f"steps {steps[0]} to {steps[1]}, {kept[0][0]:.0%} to {kept[1][0]:.0%} kept")
    return f"silent: {'; '.join(told)}" if told else "never silent"


def tell_of_cuts(cards: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Print, seed by seed, when the plain model is lost, where the mixture looks and what its cut costs."""
    differences = {}
    for seed in sorted({seed for _, seed in cards}):
        plain, mixed, cut = (cards[name, seed] for name in ("plain", "mixture", "mixture, cut"))
        looks = watch(plain)
        place = next(n for n, look in enumerate(looks) if look["kept"][0] < 1 and look["gradients"][1] < LOST)
        share = sum(mixed["trained"]["mixture"][FIRST : LAST + 1])
        layers = [card["macs"]["value"] for card in (mixed, cut)]
        same = watch(mixed) == watch(cut)  # a cut of the very run beside it, or of the same recipe trained again
        differences[seed] = (accuracy(cut) - accuracy(mixed), same)
        print(
            f"seed {seed}: plain lost between steps {looks[place - 1]['step']} and {looks[place]['step']}, "
            f"{looks[place - 1]['kept'][0]:.0%} to {looks[place]['kept'][0]:.0%} kept; layers {FIRST} to {LAST} hold "
            f"{share:.2f} of the mixture; cut: {layers[0] / layers[1]:.1f}x fewer multiplications, "
            f"{differences[seed][0]:+.2f}{'' if same else ' (cut of another run of the same recipe)'}"
        )
    every = list(differences.values())
    for name, chosen in (("all", [one for one, _ in every]), ("same run", [one for one, same in every if same])):
        error = np.std(chosen, ddof=1) / len(chosen) ** 0.5
        print(f"cut - mixture, {name}: {np.mean(chosen):+.2f} ± {error:.2f} ({len(chosen)} seeds)")


def main() -> None:
    """Print every run, then what is asked of the study with cuts."""
    cards = {(card["preset"], card["seed"]): card for card in load_cards(Path(sys.argv[1]))}
    for (name, seed), card in sorted(cards.items()):
        print(f"{name}, seed {seed}: {accuracy(card):.1f}, {silence(watch(card))}")
    if {"plain", "mixture", "mixture, cut"} <= {name for name, _ in cards}:
        tell_of_cuts(cards)


if __name__ == "__main__":
    main()
