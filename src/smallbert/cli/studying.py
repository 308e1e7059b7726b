"""The verb study: recipes x seeds x tasks, and what can be said about them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smallbert.cli.options import (
    COMMAND,
    Again,
    Data,
    Device,
    Examples,
    Json,
    Kind,
    Label,
    Length,
    ModelOrFamily,
    Pair,
    Seeds,
    Text,
    Tiny,
    print_json,
    progress,
    read_seeds,
)
from smallbert.errors import UserError

if TYPE_CHECKING:
    from smallbert.cli.progress import Progress
    from smallbert.report.study import Report
    from smallbert.studies.study import Bench, Study


def study(
    model: ModelOrFamily = None,
    recipes: Annotated[
        str, typer.Option("--recipes", help="Recipes with ; between them; the others are compared with the first.")
    ] = "",
    seeds: Seeds = "0",
    task: Annotated[str | None, typer.Option("--task", help="A task, or several with commas: tense,subj.")] = None,
    out: Annotated[str, typer.Option("--out", help="Where cards and the report go.")] = "smallbert-study",
    names: Annotated[str | None, typer.Option("--names", help="Names of the recipes, with ; between them.")] = None,
    vary: Annotated[
        str | None, typer.Option("--vary", help="Run each recipe with each value of a setting: epochs=2,4,6,8.")
    ] = None,
    split: Annotated[
        str,
        typer.Option("--split", help="Score on dev, test, or choose: rows held out of train, no text shared."),
    ] = "dev",
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Runs at a time (1 on a CPU, up to 8 on a GPU).", min=1)
    ] = None,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep every model, not only its card.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing; report on the finished runs.")
    ] = False,
    again: Again = False,
    pack: Annotated[bool, typer.Option("--pack", help="Put the cards into one file, cards.jsonl.")] = False,
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
    """Run recipes with many seeds, and say what differs beyond chance; to continue after a stop, repeat the command."""
    numbers = read_seeds(seeds)
    if split not in ("dev", "test", "choose"):
        raise UserError(f"--split was given {split!r}; write dev, test or choose")
    if not tiny and (model is None or task is None):
        raise UserError("study needs a MODEL and --task; or write --tiny to check the machinery without either")
    with progress() as say:
        say("starting")
        from smallbert.machine.files import alone_in
        from smallbert.measuring.card import MACHINERY_CHECK, RESULT
        from smallbert.measuring.shelf import pack_cards
        from smallbert.report.study import to_json, write_study
        from smallbert.report.traces import write_watches
        from smallbert.studies import study as studies
        from smallbert.studies.arms import read_arms
        from smallbert.studies.runs import run_study

        arms, setting = read_arms(recipes, names, vary)
        asked = studies.Study(
            model=model,
            tasks=tuple(dict.fromkeys(name.strip() for name in (task or "").split(",") if name.strip())),
            arms=arms,
            seeds=numbers,
            out=Path(out),
            vary=setting,
            named=names is not None,
            split=split,
            kind=MACHINERY_CHECK if tiny else RESULT,
            keep_models=keep_models,
            again=again,
            command=COMMAND.get().replace(" --report-only", "").replace(" --pack", ""),  # what makes it, not shows it
            device=device,
            length=length,
            examples=examples,
            data=data,
            columns={"text": text, "pair": pair, "label": label, "kind": kind},
        )
        say("reading the model and the data")
        bench = studies.open_bench(asked, say.line)
        if report_only:
            results = studies.results_of(asked, bench)
        else:
            results = run_study(asked, bench, jobs, say, say.line)
        say("writing the report")
        report = _report(asked, bench, results)
        watched = write_watches(studies.cards_of(asked, bench), Path(out))
        files = [*write_study(report, Path(out), [path.name for path in watched]), *watched]
        if pack:
            with alone_in(Path(out)):
                files.append(pack_cards(out))
        if json:
            print_json({**to_json(report), "files": [str(path) for path in files]})
        else:
            _show(say, report, out, tiny)
    if not any(result.score is not None for result in results):
        raise typer.Exit(1)


def _report(study: Study, bench: Bench, results: list[Any]) -> Report:
    from smallbert.measuring.card import RESULT
    from smallbert.report.study import About, make_report

    tasks = {name: (task.metrics[0], task.kind, task.chance_on(study.split)) for name, task in bench.tasks.items()}
    arms = [(arm.name, arm.value, arm.recipe.brief()) for arm in study.arms]
    judged = study.kind == RESULT
    return make_report(results, About(bench.start.name, study.split, study.command, tasks, arms, study.vary, judged))


def _show(say: Progress, report: Report, out: str, tiny: bool) -> None:
    from smallbert.cli.telling import BANNER
    from smallbert.report.sheets import render_sheet
    from smallbert.report.study import troubles

    say.show(*([BANNER] if tiny else []), *map(render_sheet, report.sheets))
    for trouble in troubles(report):
        say.line(trouble)
    drawn = find_spec("matplotlib") is not None
    say.show(f"Tables and numbers are in {out}: study.md, study.json{', *.png' if drawn else ''}")
    if not drawn:
        say.line("no pictures, since matplotlib is not installed; run: pip install -e '.[report]'")
    say.show(*report.sentences)
