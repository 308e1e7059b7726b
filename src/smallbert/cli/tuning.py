"""The verb tune: search the settings of a recipe, and say what that gains on data the search has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smallbert.cli.options import (
    COMMAND,
    Data,
    Device,
    Examples,
    Json,
    Kind,
    Label,
    Length,
    ModelOrFamily,
    OneTask,
    Pair,
    Text,
    Tiny,
    print_json,
    progress,
    read_seeds,
)
from smallbert.errors import UserError
from smallbert.machine.files import check_folder

if TYPE_CHECKING:
    from smallbert.studies.study import Bench
    from smallbert.tuning.search import Tuning


def tune(
    model: ModelOrFamily = None,
    recipe: Annotated[
        str, typer.Option("--recipe", help="The search space: 'finetune(lr=log(1e-6, 1e-4), epochs={1, 2, 3})'.")
    ] = "",
    task: OneTask = None,
    trials: Annotated[
        int, typer.Option("--trials", help="How many recipes to try, counting those already in the storage.", min=1)
    ] = 100,
    seeds: Annotated[
        str, typer.Option("--seeds", help="Seeds with which winner and default are trained and scored.")
    ] = "0,1,2",
    out: Annotated[str, typer.Option("--out", help="Where records, cards and the report go.")] = "smallbert-tune",
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", help="A database: sqlite:///FILE (default: in --out), or a server for several machines."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The search's name in the storage.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Trials at a time (1 on a CPU, up to 8 on a GPU).", min=1)
    ] = None,
    draws: Annotated[int, typer.Option("--draw-seed", help="Seed of the search.", min=0)] = 0,
    prune: Annotated[bool, typer.Option("--prune/--no-prune", help="Stop bad trials early.")] = True,
    final: Annotated[
        bool,
        typer.Option("--final/--search-only", help="Train and score the winner, or leave that to another process."),
    ] = True,
    split: Annotated[str, typer.Option("--split", help="Score the winner on dev or test.")] = "dev",
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep the final models, not only cards.")] = False,
    tiny: Tiny = False,
    data: Data = None,
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    examples: Examples = None,
    length: Length = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Search settings on a part of train, then say on dev what the best gain; to continue, repeat the command."""
    numbers = read_seeds(seeds)
    if split not in ("dev", "test"):
        raise UserError(f"--split was given {split!r}; write dev or test")
    if not tiny and (model is None or task is None):
        raise UserError("tune needs a MODEL and --task; or write --tiny to check the machinery without either")
    check_folder(out)
    with progress() as say:
        say("starting")
        from smallbert.measuring.card import MACHINERY_CHECK, RESULT
        from smallbert.report import tuning as report
        from smallbert.report.sheets import render_sheet
        from smallbert.studies import study as studies
        from smallbert.tuning import search
        from smallbert.tuning.records import FILE, best_of
        from smallbert.tuning.storage import without_password

        study = studies.Study(
            model=model,
            tasks=(task or "",),
            arms=(),
            seeds=numbers,
            out=Path(out),
            split=split,
            kind=MACHINERY_CHECK if tiny else RESULT,
            keep_models=keep_models,
            command=without_password(COMMAND.get()),
            device=device,
            length=length,
            examples=examples,
            data=data,
            columns={"text": text, "pair": pair, "label": label, "kind": kind},
        )
        where = storage or f"sqlite:///{out}/tune.db"
        tuning = search.Tuning(study, recipe, trials, where, name, draws, prune)
        search.check_tuning(tuning)
        say("reading the model and the data")
        bench = studies.open_bench(study, say.line)
        about = _about(tuning, bench)
        if other := report.other_search(Path(out), about):
            say.line(other)
        space = report.space_sheet(about["choices"])
        if json:
            for row in space.rows:
                say.line(f"{row[0]}: {row[1]} {row[2]}, default {row[3]}")
        else:
            say.show(render_sheet(space))
        records = search.search(tuning, bench, jobs, say, say.line)
        best, runs = best_of(records), list[Any]()
        if best is not None and final:
            _, runs = search.run_finals(tuning, bench, best, jobs, say, say.line)
        say("writing the report")
        result = report.make_result(about, records, runs)
        last = report.final_sheet(result, runs)
        sheets = [report.trials_sheet(result, records), *([last] if last else [])]
        files = [*report.write_tune(result, records, [space, *sheets], Path(out)), Path(out) / FILE]
        if json:
            print_json({**result, "files": [str(path) for path in files]})
        else:
            say.show(*map(render_sheet, sheets), f"Written: {', '.join(map(str, files))}", *result["sentences"])
    if best is None:
        raise typer.Exit(1)


def _about(tuning: Tuning, bench: Bench) -> dict[str, Any]:
    """What was asked for, and by which rules it is answered, for the report."""
    from smallbert.measuring.card import RESULT
    from smallbert.tuning.held import MOST, SHARE, search_task
    from smallbert.tuning.space import read_space, rows
    from smallbert.tuning.storage import BEFORE_PRUNING, FIRST, without_password
    from smallbert.tuning.trial import LOOKS, SEED

    space, (task,) = read_space(tuning.space), bench.tasks.values()
    split, study = search_task(task), tuning.study
    count = {"train": len(split.split("train")), "held out": len(split.split("dev"))}
    choices = [
        {
            **{"name": name, "kind": kind, "range": words, "default": default},
            **({"values": list(choice.values)} if choice.values else {"low": choice.low, "high": choice.high}),
        }
        for (name, kind, words, default), choice in zip(rows(space), space.choices.values(), strict=True)
    ]
    seeds = ", ".join(map(str, study.seeds))
    pruned = f"scored after {', '.join(map(str, LOOKS))} % of its last training phase and stopped below the median"
    protocol = [
        f"{SHARE:.0%} of train's whole rows, at most {MOST:,} ({count['held out']:,} here), are held out with every "
        f"row that shares text with them, whatever the seed; trials train on the other {count['train']:,} and are "
        "chosen by their scores on the rows held out",
        f"every trial trains with seed {SEED}; no seed is searched",
        f"{study.split} is not loaded into any trial; winner and default are trained on all of train with the seeds "
        f"{seeds} and scored on it once each",
        f"drawn by TPE (multivariate; the first {FIRST} at random) with seed {tuning.draws}; the first trial is "
        "the default: the first value of a set, no maybe(), a setting's own default or a range's middle",
        f"a trial is {pruned} of the others, once {BEFORE_PRUNING} have ended"
        if tuning.prune
        else "no trial is pruned",
    ]
    return {
        "command": study.command,
        "model": bench.start.name,
        "task": task.name,
        "metric": task.metrics[0],
        "split": study.split,
        "space": " ".join(tuning.space.split()),
        "choices": choices,
        "defaults": space.defaults(),
        "default_recipe": space.default().key(),
        "trials": tuning.trials,
        "storage": without_password(tuning.storage),
        "seeds": list(study.seeds),
        "search_seed": SEED,
        "draw_seed": tuning.draws,
        "rows": count,
        "judged": study.kind == RESULT,
        "protocol": protocol,
    }
