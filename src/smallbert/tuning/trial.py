"""One trial: a recipe drawn, trained on the rest of train, and scored on the rows held out of it; dev is not there."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from smallbert.errors import RunError
from smallbert.features.frozen import why_not
from smallbert.machine.files import is_full_disk
from smallbert.machine.sharing import is_trouble_of_the_process
from smallbert.making.likeness import beginnings
from smallbert.making.make import why_of
from smallbert.making.run import run_recipe
from smallbert.making.starting import Say, Start, quiet
from smallbert.methods import Method
from smallbert.recipes.recipe import Phase, Recipe
from smallbert.tasks import Task
from smallbert.texts.data import Stream
from smallbert.training.phase import BACKBONE
from smallbert.tuning.held import Held, common_texts
from smallbert.tuning.records import DIVERGED, FAILED, OK, PRUNED, SURPLUS, Record, records_of
from smallbert.tuning.space import Choice, Space
from smallbert.tuning.storage import ME, optuna

SEED = 1000  # every trial trains with it, and nothing that is reported does
LOOKS = (25, 50, 75)  # percent of the last training phase after which a trial is scored, and stopped if it is bad
COMMON = ".trials"  # the folder of what trials have in common, in that of the search


class Settled(Exception):
    """A trial that failed and was written down; the search goes on."""


class Diverged(optuna.TrialPruned):
    """A trial that has no score; to the sampler, one of the worst."""


@dataclass
class Setup:
    """What all trials of one process share: the model, the rows, their tokens, and beginnings they have in common."""

    start: Start
    task: Task
    space: Space
    study: Any
    trials: int
    out: Path
    device: str | None
    common: dict[str, Path]  # trained beginnings -> where each is kept
    fixed: set[str]  # all beginnings that trials may have in common
    held: Held
    streams: dict[str, Stream] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)


def open_setup(
    start: Start, task: Task, space: Space, study: Any, trials: int, out: Path, device: str | None = None
) -> Setup:
    """Find what trials have in common, and where it is kept: each trained beginning once, for all processes."""
    about, common = f"{start.fingerprint} {task.fingerprint} seed {SEED}", common_texts(space, start, task)
    folders = {
        text: out / COMMON / hashlib.sha256(f"{about} {text}".encode()).hexdigest()[:12]
        for text, trains in common.items()
        if trains
    }
    held = Held(task, out / COMMON / "states")
    held.use_with_others(out / COMMON)
    return Setup(start, task, space, study, trials, out, device, folders, set(common), held)


def run_trial(setup: Setup, trial: Any, alone: bool = True, say: Say = quiet) -> float:
    """Draw, train, score and write down one trial; what Optuna calls for each."""
    begun = time.monotonic()
    trial.set_user_attr("by", ME)
    before = [one for one in records_of(setup.study) if one.trial < trial.number]
    if _is_surplus(setup, before, trial):
        trial.set_user_attr("end", {"status": SURPLUS})
        raise optuna.TrialPruned
    drawn: dict[str, Any] = {}

    def choose(choice: Choice) -> Any:
        drawn[choice.name] = choice.rounded(suggest(trial, choice))
        return drawn[choice.name]

    def end(status: str, why: str | None = None, error: float | None = None) -> None:
        seconds = round(time.monotonic() - begun, 2)
        trial.set_user_attr("end", {"status": status, "why": why, "error": error, "seconds": seconds})

    twin: Record | None = None
    try:
        recipe = setup.space.draw(choose)
        trial.set_user_attr("work", {"drawn": drawn, "recipe": str(recipe)})
        work = recipe.key()
        twin = next((one for one in before if one.is_done and Recipe(one.recipe).key() == work), None)
        if twin is not None:
            return _end_alike(trial, twin)
        value, error = _train(setup, recipe, trial, say)
        end(OK, error=round(error, 4))
        return value
    except Settled:
        raise
    except Diverged as diverged:
        end(DIVERGED, str(diverged))
        raise
    except optuna.TrialPruned:
        if twin is None:
            end(PRUNED, "its intermediate scores were below the median of the others")
        raise
    except KeyboardInterrupt:
        trial.set_user_attr("interrupted", True)
        raise
    except Exception as failure:
        fault = isinstance(failure, RunError | OSError) or is_full_disk(failure)
        if fault or (not alone and is_trouble_of_the_process(failure)):
            raise  # not the recipe's fault: another process may do better
        end(FAILED, why_of(failure))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise Settled from failure


def suggest(trial: Any, choice: Choice) -> Any:
    """Let the sampler choose."""
    if choice.values:
        return trial.suggest_categorical(choice.name, choice.values)
    pick = trial.suggest_int if choice.whole else trial.suggest_float
    return pick(choice.name, choice.low, choice.high, log=choice.kind == "log")


def _is_surplus(setup: Setup, before: list[Record], trial: Any) -> bool:
    """Whether another process began the last trial that was missing, or the same dead one again, before this one."""
    again = trial.user_attrs.get("again")
    if again is not None:
        others = setup.study.get_trials(deepcopy=False)
        return any(one.number < trial.number and one.user_attrs.get("again") == again for one in others)
    return sum(one.is_done or one.status == "running" for one in before) >= setup.trials


def _end_alike(trial: Any, twin: Record) -> float:
    """The same recipe with the same seed ends in the same way, so it is not trained again."""
    why = f"the same recipe as trial {twin.trial}" + (f": {twin.why}" if twin.why else "")
    end = {"status": twin.status, "why": why, "error": twin.error, "seconds": 0.0, "score": twin.score}
    trial.set_user_attr("end", end)
    if twin.status == OK and twin.score is not None:
        return twin.score
    raise Settled if twin.status == FAILED else optuna.TrialPruned


def _train(setup: Setup, recipe: Recipe, trial: Any, say: Say) -> tuple[float, float]:
    """Run a drawn recipe and score it; a trial that is stopped on the way, or diverges, is pruned."""

    part = _frozen_part(setup, recipe)

    def report(phase: Any) -> None:
        shares = [share for share in LOOKS if phase.step == max(1, round(phase.total * share / 100))]
        if not shares or phase.step == phase.total:
            return
        common = part is not None and why_not(phase) is None  # then the backbone does not run, and stays as it is
        with phase.as_seen(runs=not common), torch.compiler.set_stance("force_eager"):
            found, _ = setup.held.score(phase.encoder, common=common)
        phase.begin_training()
        trial.report(found, shares[-1])
        if trial.should_prune():
            raise optuna.TrialPruned

    outcome = run_recipe(
        _with_looks(recipe, report),
        setup.start.encoder,
        setup.task,
        SEED,
        device=setup.device,
        key=setup.start.fingerprint,
        say=say,
        common=setup.common,
        judge=False,  # its score on the rows held out says it all
        streams=setup.streams,
        memory=setup.memory,
        states=None if part is None else setup.held.states,
        stores=setup.held.stores,
    )
    if outcome.diverged:
        raise Diverged(outcome.diverged)
    weights = outcome.encoder.named_parameters()
    learned = [one for name, one in weights if part is None or not name.startswith(BACKBONE)]
    if not all(bool(tensor.isfinite().all()) for tensor in learned):
        raise Diverged("its weights are not finite")
    return setup.held.score(outcome.encoder, say, part is not None)


def _frozen_part(setup: Setup, recipe: Recipe) -> str | None:
    """The beginning whose hidden states are all that the last phase learns from, if trials have it in common."""
    phases, texts = recipe.phases(), list(beginnings(recipe, setup.start.encoder, setup.task))
    train = phases[-1].train_setting if phases else None
    before = texts[-2] if len(texts) > 1 else ""
    how = train.settings() if train is not None else {}
    reads = how.get("freeze") == "backbone" and how["store"] == "auto"
    return before if reads and before in setup.fixed else None


def _with_looks(recipe: Recipe, report: Callable[[Any], None]) -> Recipe:
    """The recipe with a look now and then in its last training phase, which changes nothing of what it gives."""

    class _Look(Method):  # its name begins with _, so that no recipe can ask for it
        """Score the rows held out."""

        trains: ClassVar[bool] = True

        def every(self) -> int:
            """After each step, since only `look` knows how many there are."""
            return 1

        def look(self, phase: Any) -> None:
            """Score at some steps."""
            report(phase)

    phases = recipe.phases()
    last = max((place for place, phase in enumerate(phases) if phase.trains), default=None)
    if last is not None:
        phases[last] = Phase([*phases[last], _Look()])
    return Recipe(phases)
