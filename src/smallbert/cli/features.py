"""The verbs that keep hidden states: features build, check, info."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from smallbert.cli.options import (
    Data,
    Device,
    Examples,
    Json,
    Kind,
    Label,
    Length,
    Model,
    Pair,
    Split,
    TaskName,
    Text,
    print_json,
    progress,
    read_numbers,
)

features = typer.Typer(
    help="Store hidden states of all layers for a whole data set: computed once, read many times.", no_args_is_help=True
)
Folder = Annotated[str, typer.Argument(help="A folder written by features build.", metavar="DIR")]


@features.command()
def build(
    model: Model,
    task: TaskName,
    out: Annotated[
        str, typer.Option("--out", help="The folder to write; to continue after a stop, repeat the command.")
    ],
    split: Split = "train",
    layers: Annotated[
        str, typer.Option("--layers", help="all, or layers such as 0,6,12; 0 is the embedding output.")
    ] = "all",
    tokens: Annotated[str, typer.Option("--tokens", help="all, the first, or mean: the average of all.")] = "all",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float16 or int8 (one scale per token).")] = "float16",
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
    """Write the hidden states of a model for every text of a task; says its size before writing."""
    wanted = layers if layers == "all" else read_numbers(layers, "--layers")
    with progress() as say:
        say("starting")
        from smallbert.features.building import build_store
        from smallbert.features.plan import check_kinds
        from smallbert.machine.processes import processes
        from smallbert.making import starting
        from smallbert.texts.data import tokenise, usable_length

        check_kinds(tokens, dtype)
        read = starting.task_from(task, data, examples, say.line, text=text, pair=pair, label=label, kind=kind)
        start = starting.start_from(model, say.line)
        read = starting.at_length(start, read, length)
        most = usable_length(start.encoder, None, read)
        encoder = start.encoder.to(starting.check_device(device) or processes().device)
        report = lambda done, total: say("tokenising", done, total)  # noqa: E731
        stream = tokenise(encoder.tokenizer, read.split(split), read.kind, most, report)
        about = {"model_name": start.name, "task": read.name, "split": split}
        store = build_store(
            encoder,
            stream,
            out,
            layers=wanted,
            tokens=tokens,
            dtype=dtype,
            length=most,
            about=about,
            verify=True,
            say=say,
            line=say.line,
        )
        if json:
            return print_json({"folder": out, **_facts(store)})
        say.show(f"{store.bytes / 1e6:,.1f} MB of hidden states are in {out}")


@features.command()
def check(folder: Folder, json: Json = False) -> None:
    """Read every shard of a store and name those that are damaged."""
    with progress() as say:
        say("starting")
        from smallbert.features.store import open_store

        store, wrong = open_store(folder, whole=False), []
        for number, shard in enumerate(store.about["shards"], 1):
            if found := store.check(number - 1):
                wrong.append(found)
                say.line(found)
            say("checking", number, len(store.about["shards"]), str(shard["file"]))
        if json:
            print_json({"folder": folder, "shards": len(store.about["shards"]), "wrong": wrong})
        else:
            say.show(
                f"damaged shards: {len(wrong)} of {len(store.about['shards'])}" if wrong else "all shards are intact"
            )
    if wrong:
        raise typer.Exit(1)


@features.command()
def info(folder: Folder, json: Json = False) -> None:
    """Show what a store holds."""
    with progress() as say:
        say("starting")
        from smallbert.features.store import open_store

        facts = _facts(open_store(folder))
        if json:
            return print_json(facts)
        from rich.table import Table

        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in facts.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            table.add_row(name.replace("_", " "), f"{shown:,}" if isinstance(shown, int) else str(shown))
        say.show(table)


def _facts(store: Any) -> dict[str, Any]:
    hidden = ("format", "shards", "lengths")
    facts = {name: value for name, value in store.about.items() if name not in hidden and value != []}
    return {**facts, "bytes_a_text": round(store.bytes / len(store)), "shards": len(store.about["shards"])}
