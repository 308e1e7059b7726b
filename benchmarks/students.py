"""Every preset of distillation against the same student without a teacher.

    python benchmarks/students.py e5-small --task sst2 --data DATA --out runs/students-sst2 --seeds 0,1,2

A preset's own schedule is its paper's, from two epochs to six hundred, so that what is compared would be patience.
Here each student sees `--epochs` times the training set, changed copies counted as asked for (short texts give fewer:
with `bilstm` a quarter less is seen than by its control), in the shares its preset gives to its phases. Steps are
`--batch` texts, and learning rates are the presets' times the root of how much larger that is than theirs.

The controls have no teacher: no scores, no states, no copies that only a teacher labels, but as many training texts on
labels, in one phase with the settings of the preset's last. "alone" is the same student from the same weights, which
for most presets are cut out of the fine-tuned teacher; "afresh" is the same shape cut out of the encoder before that.
Neither's learning rate is tuned, and nor are the presets'; `--rates 0.25,0.5,1` has all of them at those times theirs,
and with `--split choose` one can be chosen without a look at dev.

With `--checkpoint` a small model that has read before, of any family and with a tokenizer of its own, learns the
teacher's scores too (Well-Read Students), as it is and with the 6,000 most frequent pieces of its vocabulary.

With `--then` the teacher and every student that it has taught are also measured behind one more step, such as
"quantize(8, activations=True)", the arithmetic of an int8 file.

What follows the options of this script goes to `smallbert study`. minibert is for tagging and not among these.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from smallbert.methods import Method
from smallbert.presets import PRESETS
from smallbert.recipes.recipe import Phase, Recipe

NAMES = (
    "distilbert pkd6 pkd3 pd aguilar-sid tinybert4 tinybert6 minilm minilmv2 mobilebert zhao192 zhao96 zhao48 waldorf "
    "bilstm bilstm-trimmed bilstm-tiny textbrewer rosita kd-pruned trimmed20 trimmed10 trimmed3"
).split()
TAUGHT = {"distill", "align", "augment", "unlabelled", "share_projections"}  # what a student has from its teacher
OF_TEACHER = {"finetune", "mark", "rewind", "add_vocabulary", "pretrain"}  # phases that make the teacher
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


def fit(recipe: Recipe, teacher: str, epochs: float, batch: int, rate: float) -> Iterator[Phase]:
    """The phases with the teacher's training as given, and `epochs` shared by the student's as the preset does.

    Learning rates are `rate` times what they would be.
    """
    lessons = [(phase, train.settings()) for phase in recipe if is_lesson(phase) and (train := phase.train_setting)]
    whole = sum(own["epochs"] * texts_of(phase) for phase, own in lessons)
    for phase in recipe:
        if [method.name for method in phase] == ["finetune"]:
            yield from Recipe(teacher)
        elif is_lesson(phase):
            train = phase.train_setting
            assert train is not None
            own = train.settings()
            faster = rate * (batch / (own["batch"] or OWN)) ** 0.5
            changed = again(train, epochs=round(own["epochs"] * epochs / whole, 6), batch=batch, lr=own["lr"] * faster)
            yield Phase(changed if method is train else method for method in phase)
        else:
            yield phase


def teach(name: str, rate: float, chosen: argparse.Namespace) -> Recipe:
    """A preset with the teacher, the amount of training, the times its rate and the copies that were asked for."""
    most = max(1, round(chosen.epochs) - 1)
    preset = Recipe([with_copies(phase, most, chosen.copies) for phase in Recipe(PRESETS[name].recipe)])
    return Recipe(list(fit(preset, chosen.teacher, chosen.epochs, chosen.batch, rate)))


def without_teacher(recipe: Recipe) -> Recipe:
    """The same student and as many training texts, on labels alone; phases that then only train become one."""
    phases: list[Phase] = []
    for phase in recipe:
        left = Phase(method for method in phase if method.name not in TAUGHT)
        if is_lesson(phase) and (train := phase.train_setting):
            epochs = round(train.settings()["epochs"] * texts_of(phase), 6)
            if len(left) == 1 and phases and len(phases[-1]) == 1 and is_lesson(phases[-1]):
                epochs += phases.pop()[0].settings()["epochs"]
            left = Phase(again(train, epochs=epochs) if method is train else method for method in left)
        phases += [left] * bool(left)
    return Recipe(phases)


def without_start(recipe: Recipe) -> Recipe:
    """The same from the encoder as it came, which nothing was trained on."""
    return Recipe([phase for phase in recipe if not {method.name for method in phase} <= OF_TEACHER])


def read_before(checkpoint: str, teacher: str, epochs: float, batch: int) -> Iterator[tuple[str, Recipe]]:
    """A checkpoint that learns a teacher's scores, whole and with few word pieces."""
    lesson = f"distill(alpha=0.9) + train(epochs={epochs}, batch={batch}, lr={5e-5 * (batch / OWN) ** 0.5})"
    name, taken = Path(checkpoint).name, f"{teacher} | student(model={checkpoint!r})"
    yield name, Recipe(f"{taken} | {lesson}")
    yield f"{name} of 6,000 pieces", Recipe(f"{taken} | trim_vocabulary(size=6000) | {lesson}")


def main() -> None:
    """Write the arms and leave the rest to the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--presets", default=",".join(NAMES), help="of these, separated by commas")
    parser.add_argument("--controls", default="alone", help="alone, afresh, alone,afresh or none")
    parser.add_argument("--teacher", default="finetune(epochs=3, lr=7e-5, batch=64)")
    parser.add_argument("--epochs", type=float, default=6.0, help="times the training set that each student sees")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rates", default="1", help="times the learning rates of all students, separated by commas")
    parser.add_argument("--checkpoint", help="a small model that learns too, by its folder or its name")
    parser.add_argument("--then", help="a recipe that the teacher and each taught student go through once more")
    parser.add_argument("--copies", default="runs/copies", help="folder where changed copies are kept")
    parser.add_argument("--show", action="store_true", help="print the arms, run nothing")
    chosen, more = parser.parse_known_args()
    presets, controls = chosen.presets.split(","), chosen.controls.split(",")
    if unknown := [*({*presets} - {*NAMES}), *({*controls} - {"alone", "afresh", "none"})]:
        parser.error(f"unknown: {', '.join(unknown)}; presets are {', '.join(NAMES)}, controls alone, afresh or none")
    arms, lessons = {"teacher": Recipe(chosen.teacher)}, {}
    for rate in map(float, chosen.rates.split(",")):
        said = "" if rate == 1 else f" at {rate:g} of its rate"
        lessons |= {name + said: teach(name, rate, chosen) for name in presets}
    if chosen.checkpoint:
        lessons |= read_before(chosen.checkpoint, chosen.teacher, chosen.epochs, chosen.batch)
    for name, taught in lessons.items():
        alone = without_teacher(taught)
        made = {name: taught, f"{name}, alone": alone, f"{name}, afresh": without_start(alone)}
        for arm, recipe in made.items():
            if recipe not in arms.values() and (arm == name or arm.split(", ")[1] in controls):
                arms[arm] = recipe
    if chosen.then:
        taught = {"teacher": arms["teacher"], **lessons}
        arms |= {f"{name}, then {chosen.then}": recipe | Recipe(chosen.then) for name, recipe in taught.items()}
    if chosen.show:
        print("\n".join(f"{name}: {recipe.brief()}" for name, recipe in arms.items()))
        return
    recipes = ["--names", "; ".join(arms), "--recipes", "; ".join(recipe.brief() for recipe in arms.values())]
    os.execv(sys.executable, [sys.executable, "-m", "smallbert", "study", chosen.model, *more, *recipes])


if __name__ == "__main__":
    main()
