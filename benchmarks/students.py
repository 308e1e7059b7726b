"""Every preset of distillation against the same student without a teacher, all with the same number of training texts.

    python benchmarks/students.py e5-small --task sst2 --data DATA --out runs/students-sst2 --seeds 0,1,2

A preset's own schedule is its paper's, from two epochs to six hundred, so that what is compared would be patience.
Here each student sees `--epochs` times the training set, changed copies counted (and no more of them than that), in
the shares its preset gives to its phases; steps are `--batch` texts, and learning rates are the presets' times the
root of how much larger that is than theirs. The control is the same student from the same weights, without what a
teacher gives: no scores, no states, no copies that only a teacher labels. What follows the options of this script goes
to `smallbert study`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from smallbert.methods import Method
from smallbert.presets import PRESETS
from smallbert.recipe import Phase, Recipe

# minibert is for tagging; pruned10 and the like are studied by pruning.sh
NAMES = (
    "distilbert pkd6 pkd3 pd aguilar-sid tinybert4 tinybert6 minilm minilmv2 mobilebert zhao192 zhao96 zhao48 waldorf "
    "bilstm textbrewer rosita kd-pruned"
).split()
TAUGHT = {"distill", "align", "augment", "unlabelled", "share_projections"}  # what a student has from its teacher
OWN = 32  # texts a step in presets that do not say


def again(method: Method, **settings: object) -> Method:
    """The same method with some settings changed."""
    return type(method)(**{**method.settings(), **settings})


def with_copies(phase: Phase, most: int, folder: str) -> Phase:
    """The phase with at most so many changed copies of a text, kept where all arms and seeds find them."""
    return Phase(
        again(method, copies=min(method.settings()["copies"], most), folder=folder)
        if method.name == "augment"
        else method
        for method in phase
    )


def texts_of(phase: Phase) -> float:
    """How many times the training set one epoch of a phase is, changed copies counted."""
    return 1.0 + sum(method.settings()["copies"] for method in phase if method.name == "augment")


def is_lesson(phase: Phase) -> bool:
    """Whether it trains a student (and not the teacher, or on plain text)."""
    return phase.train_setting is not None and all(method.name not in ("finetune", "pretrain") for method in phase)


def fit(recipe: Recipe, teacher: str, epochs: float, batch: int) -> Iterator[Phase]:
    """The phases with the teacher's training as given, and `epochs` shared by the student's as the preset does."""
    lessons = [(phase, train.settings()) for phase in recipe if is_lesson(phase) and (train := phase.train_setting)]
    whole = sum(own["epochs"] * texts_of(phase) for phase, own in lessons)
    for phase in recipe:
        if [method.name for method in phase] == ["finetune"]:
            yield from Recipe(teacher)
        elif is_lesson(phase):
            train = phase.train_setting
            assert train is not None
            own = train.settings()
            faster = (batch / (own["batch"] or OWN)) ** 0.5
            changed = again(train, epochs=round(own["epochs"] * epochs / whole, 6), batch=batch, lr=own["lr"] * faster)
            yield Phase(changed if method is train else method for method in phase)
        else:
            yield phase


def without_teacher(recipe: Recipe) -> Recipe:
    """The same student and as many training texts, on labels alone; phases that then do the same become one."""
    phases: list[Phase] = []
    for phase in recipe:
        train, times = phase.train_setting, texts_of(phase)
        left = Phase(method for method in phase if method.name not in TAUGHT)
        if is_lesson(phase) and train is not None:
            own = train.settings()
            left = Phase(
                again(train, epochs=round(own["epochs"] * times, 6)) if method is train else method for method in left
            )
            before = phases[-1] if phases else Phase()
            if len(left) == 1 and len(before) == 1 and is_lesson(before):  # the phase before was only training, too
                held = before[0].settings()
                both = {"epochs": held["epochs"] + left[0].settings()["epochs"], "lr": max(held["lr"], own["lr"])}
                phases[-1] = Phase([again(train, **both)])
                continue
        if left:
            phases.append(left)
    return Recipe(phases)


def main() -> None:
    """Write the arms and leave the rest to the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--presets", default=",".join(NAMES), help="of these, separated by commas")
    parser.add_argument("--teacher", default="finetune(epochs=3, lr=7e-5, batch=64)")
    parser.add_argument("--epochs", type=float, default=6.0, help="times the training set that each student sees")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--copies", default="runs/copies", help="folder where changed copies are kept")
    parser.add_argument("--show", action="store_true", help="print the arms, run nothing")
    chosen, more = parser.parse_known_args()
    arms, most = {"teacher": Recipe(chosen.teacher)}, max(1, round(chosen.epochs) - 1)
    for name in chosen.presets.split(","):
        preset = Recipe([with_copies(phase, most, chosen.copies) for phase in Recipe(PRESETS[name].recipe)])
        taught = Recipe(list(fit(preset, chosen.teacher, chosen.epochs, chosen.batch)))
        alone = without_teacher(taught)
        arms[name] = taught
        if alone not in arms.values():
            arms[f"{name}, alone"] = alone
    if chosen.show:
        print("\n".join(f"{name}: {recipe}" for name, recipe in arms.items()))
        return
    recipes = ["--names", "; ".join(arms), "--recipes", "; ".join(map(str, arms.values()))]
    os.execv(sys.executable, [sys.executable, "-m", "smallbert", "study", chosen.model, *more, *recipes])


if __name__ == "__main__":
    main()
