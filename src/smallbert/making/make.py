"""Making one model: run a recipe, save the folder, measure it, write its card. What has a card is never made again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from smallbert.errors import RunError, UserError
from smallbert.machine.files import alone_in, is_full_disk, move_folder, write_json, write_text
from smallbert.machine.memory import hand_back
from smallbert.machine.processes import from_main, processes
from smallbert.making.estimate import files_read
from smallbert.making.places import Place, check_writable, find_place, known_card, remove_empty
from smallbert.making.readme import model_readme
from smallbert.making.run import Outcome, run_recipe
from smallbert.making.starting import Say, Start, at_length, check_device, quiet
from smallbert.making.unfinished import check_unfinished
from smallbert.measuring.budget import show
from smallbert.measuring.card import RESULT, Card, card_key, make_card
from smallbert.measuring.disk import measure_bytes
from smallbert.measuring.evaluate import evaluate
from smallbert.measuring.model import measure_model
from smallbert.measuring.pruned import told_once
from smallbert.measuring.shelf import card_beside, load_card
from smallbert.model.answering import match_labels, note_names, with_plain_head
from smallbert.model.encoder import PLAIN
from smallbert.model.folders import save_folder
from smallbert.recipes.recipe import Recipe, Usable
from smallbert.tasks import Task
from smallbert.texts.data import Stream

OF_THE_RUN = ("model", "model_fingerprint", "model_bytes", "recipe", "reads", "preset", "seed", "kind")


def make_one(
    recipe: Usable,
    start: Start,
    task: Task,
    seed: int,
    out: Path | str,
    *,
    preset: str | None = None,
    length: int | None = None,
    kind: str = RESULT,
    command: str = "",
    device: str | None = None,
    say: Say = quiet,
    alone: bool = False,
    keep_going: bool = False,
    again: bool = False,
    seconds: float | None = 2.0,
    common: Mapping[str, Path] | None = None,
    split: str = "dev",
    keep_model: bool = True,
    raising: Callable[[Exception], bool] = lambda error: False,
    streams: dict[str, Stream] | None = None,
    states: Path | None = None,
    said: Path | None = None,
) -> Card:
    """Make and measure one model, or give its card if it was made before.

    The card lands in out/cards, the model in out/models (or nowhere); `alone`, both in `out` itself. A run that fails
    raises, or with `keep_going` becomes a card that says why, unless the error is one for `raising`; `again`
    tries failed ones once more. Without `seconds` to spend nothing is timed. Runs may share `states` and what is
    `said`, as in run_recipe.
    """
    recipe = Recipe(recipe)
    if not 0 <= seed < 2**32:  # of which all bits count
        raise UserError(f"a seed is 0 or more and less than 2**32, not {seed}")
    task = at_length(start, task, length)
    facts = _facts(start, recipe, task, seed, split) | {"preset": preset, "kind": kind, "command": command}
    facts["model_bytes"] = measure_bytes(start.folder)["total"] if start.folder is not None else None
    key = card_key(**facts)
    place = find_place(out, key, alone)
    known = from_main(lambda: known_card(place, key, alone))
    if known is not None and not (again and known["status"] == "failed"):
        return dict(known)
    settings: dict[str, Any] = {"device": check_device(device), "work": place.work, "common": common}
    # A tiny random model learns nothing.
    settings |= {"key": start.fingerprint, "judge": kind == RESULT, "streams": streams, "states": states, "said": said}
    from_main(lambda: check_writable(out, place))
    try:
        with ExitStack() as held:
            held.callback(hand_back)
            held.callback(remove_empty, place.work)
            if alone and processes().is_main_process:
                held.enter_context(alone_in(place.work))
                check_unfinished(place.work, recipe, start, task, seed)
            outcome = run_recipe(recipe, start.encoder, task, seed, say=say, **settings)
            if processes().is_main_process:
                as_given = start.folder if not len(recipe) and not alone else None
                _finish(outcome, place, facts, task, say, seconds, keep_model, as_given)
    except Exception as error:
        if not keep_going or isinstance(error, RunError | OSError) or is_full_disk(error) or raising(error):
            raise
        write_json(place.card, make_card(**facts, status="failed", why=why_of(error), missing={}))
        shutil.rmtree(place.work, ignore_errors=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    processes().wait_for_everyone()
    return load_card(place.card)


def give_up(
    recipe: Recipe, start: Start, task: Task, seed: int, out: Path | str, why: str, split: str = "dev", **facts: Any
) -> None:
    """Write the card of a run that cannot be made, such as one whose process was killed."""
    card = make_card(**_facts(start, recipe, task, seed, split), **facts, status="failed", why=why, missing={})
    place = find_place(out, card_key(**card))
    write_json(place.card, card)
    shutil.rmtree(place.work, ignore_errors=True)


def work_key(recipe: Recipe, start: Start, task: Task, seed: int, kind: str = RESULT, split: str = "dev") -> str:
    """The name of one piece of work, as on its card."""
    return card_key(**_facts(start, recipe, task, seed, split), kind=kind)


def make_eval_card(
    start: Start, task: Task, split: str = "dev", *, length: int | None = None, command: str = "", say: Say = quiet
) -> Card:
    """Measure a saved model as it is; what its own card says about how it was made is kept."""
    assert start.folder is not None
    task = at_length(start, task, length)
    encoder = match_labels(start.encoder, task)
    found = measure_model(encoder, start.folder, task, split, say)
    own, damage = card_beside(start.folder)
    notes = [*found.pop("notes"), *note_names(encoder.head.labels, task), *damage]
    steps = " | ".join(entry["step"] for entry in encoder.history)
    facts = _facts(start, steps or "identity", task, 0, split) | {"model_bytes": found["bytes"]["total"]}
    if own is not None:
        facts |= {field: own[field] for field in OF_THE_RUN}
    trained = (own and own["trained"]) or {"steps": None, "epochs": None, "packed": None, "notes": []}
    trained |= {"notes": list(dict.fromkeys(told_once(trained["notes"], notes)))}  # training has said some of them
    return make_card(**facts, **found, trained=trained, seconds=own["seconds"] if own else None, command=command)


def write_card(place: Place, card: Card, layout: str | None = None) -> None:
    """Write the card and what a person reads beside the model; the card of the work comes last and means: finished."""
    if place.model.is_dir():
        layout = layout or json.loads((place.model / "encoder.json").read_text(encoding="utf-8"))["layout"]
        write_text(place.model / "README.md", model_readme(card, layout))
        write_json(place.model / "card.json", card)
    write_json(place.card, card)


def _finish(
    outcome: Outcome,
    place: Place,
    facts: dict[str, Any],
    task: Task,
    say: Say,
    seconds: float | None,
    keep_model: bool,
    as_given: Path | None,
) -> None:
    """Save, measure, write down; then drop what was kept for a kill, and the model too if it is not to be kept.

    A model that stands in a comparison `as_given` weighs what its own files do, not what our copy of it does.
    """
    say("saving", 0, 0, "")
    made = place._replace(model=place.work / "model", card=place.work / "model" / "card.json")
    layout = save_folder(outcome.encoder, made.model)
    # What holds no numbers has no score; its status says what there is to say.
    broken = [name for name, tensor in outcome.encoder.state_dict().items() if not bool(tensor.isfinite().all())]
    told = f"{broken[0]} holds NaN or infinite values" if broken else ""
    sound, diverged = not broken, "; ".join(filter(None, [outcome.diverged, told]))
    found = measure_model(outcome.encoder, made.model, task, facts["split"], say, seconds) if sound else {"notes": []}
    notes = told_once(outcome.notes, found.pop("notes"))
    notes += note_names(outcome.encoder.head.labels, task)
    if as_given is not None and sound:
        copy, found["bytes"] = found["bytes"], measure_bytes(as_given)
        given, ours = (show("size", size["total"]) for size in (found["bytes"], copy))
        notes += [f"the files given take {given}, this copy of them {ours}"] * (given != ours)
    trained = {"steps": outcome.steps, "epochs": outcome.epochs, "packed": outcome.packed, "notes": notes}
    more = {"mixture": outcome.encoder.reading, "traces": outcome.traces}
    if sound and PLAIN in outcome.encoder.heads:
        more["plain_head"] = evaluate(with_plain_head(outcome.encoder), task, facts["split"], None, say)["scores"]
    trained |= {name: value for name, value in more.items() if value}
    status = {"status": "diverged", "why": diverged} if diverged else {"status": "ok"}
    card = make_card(**facts, **found, **status, trained=trained, seconds=outcome.seconds)
    if keep_model:
        write_card(made, card, layout)
        move_folder(made.model, place.model)  # measured and described: a kill before this line finds no model at all
    write_json(place.card, card)
    shutil.rmtree(place.work, ignore_errors=True)


def _facts(start: Start, recipe: Recipe | str, task: Task, seed: int, split: str = "dev") -> dict[str, Any]:
    """What a card says before anything is run."""
    examples = task.fingerprint
    if split != "dev":  # scored on other examples, so another card, and not comparable
        import hashlib

        examples = hashlib.sha256(f"{examples} {split}".encode()).hexdigest()[:16]
    return {
        "model": start.name,
        "model_fingerprint": start.fingerprint,
        "recipe": recipe.key() if isinstance(recipe, Recipe) else recipe,
        "reads": files_read(recipe) if isinstance(recipe, Recipe) else None,
        "task": task.name,
        "task_note": task.note or None,
        "task_fingerprint": examples,
        "seed": seed,
        "split": split,
        "headline": task.metrics[0],
        "chance": task.chance_on(split),
    }


def why_of(error: Exception) -> str:
    """One line on what went wrong."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "not enough memory; a smaller batch may fit"
    text = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
