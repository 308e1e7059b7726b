"""The verb that times models side by side: bench."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from smallbert.cli.options import Data, Json, Kind, Label, Pair, Text, print_json, progress, read_numbers
from smallbert.errors import UserError
from smallbert.machine.files import check_folder, write_json

LEAST_THREADS = 256  # may be asked for on any machine; many thousands end the process inside OpenMP


def bench(
    folders: Annotated[list[str], typer.Argument(help="Models: smallbert or Hugging Face folders, or ONNX exports.")],
    variants: Annotated[
        str | None,
        typer.Option("--variants", help="Also time exports of the first model: onnx,onnx-int8,onnx-int8-calibrated."),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="Batch size, or several: 1,8.")] = "1",
    length: Annotated[str, typer.Option("--length", help="Tokens per text, or several: 32,128.")] = "32",
    threads: Annotated[str, typer.Option("--threads", help="Threads, or several: 1,4.")] = "1",
    seconds: Annotated[
        float, typer.Option("--seconds", help="Seconds to time each model at each setting.", min=0)
    ] = 2.0,
    task: Annotated[str | None, typer.Option("--task", help="Also score the models, on this task.")] = None,
    split: Annotated[str, typer.Option("--split", help="Which split to score on: train, dev or test.")] = "dev",
    max_drop: Annotated[
        float | None,
        typer.Option("--max-drop", help="Choose the fastest model that loses at most this many points.", min=0),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="A folder for the record, the picture and the exports.")
    ] = None,
    data: Data = None,
    text: Text = None,
    pair: Pair = None,
    label: Label = None,
    kind: Kind = None,
    json: Json = False,
) -> None:
    """Time models in turns, and choose the fastest that holds the score."""
    settings = {
        name: read_numbers(given, f"--{option}")
        for name, option, given in (
            ("batches", "batch", batch),
            ("lengths", "length", length),
            ("threads", "threads", threads),
        )
    }
    if min(min(each) for each in settings.values()) < 1:
        raise UserError("--batch, --length and --threads must be 1 or more")
    if max(settings["threads"]) > (most := max(LEAST_THREADS, 4 * (os.cpu_count() or 1))):
        raise UserError(f"--threads was given {max(settings['threads'])}; at most {most} are useful on this machine")
    if max_drop is not None and task is None:
        raise UserError("--max-drop compares scores: give --task, such as --task sst2")
    if out:
        check_folder(out)
    with progress() as say, ExitStack() as stack:
        say("starting")
        from smallbert.bench.run import bench as run_bench
        from smallbert.bench.run import check_variants
        from smallbert.bench.variants import make_variants, read_names, read_variant
        from smallbert.making import starting
        from smallbert.report.benching import bench_table, draw_bench

        exports, read = read_names(variants, task is not None) if variants else [], None
        if task is not None:
            read = starting.task_from(task, data, None, say.line, text=text, pair=pair, label=label, kind=kind)
            read.split(split)
        models = [read_variant(folder) for folder in folders]
        check_variants(models, settings["lengths"], read, exports)
        if exports:
            into = Path(out) if out else Path(stack.enter_context(TemporaryDirectory()))
            models += make_variants(folders[0], exports, into, say, read)
        record = run_bench(models, **settings, seconds=seconds, task=read, split=split, max_drop=max_drop, say=say)
        if out:
            write_json(Path(out) / "bench.json", record)
            draw_bench(record, Path(out) / "bench.png")
        if json:
            return print_json(record)
        say.show(bench_table(record))
        if record["choice"]:
            say.show(record["choice"]["sentence"])
        if out:
            say.show(f"The record and the picture are in {out}")
