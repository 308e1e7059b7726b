"""The verb that answers requests: serve."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from smallbert.cli.options import Json, print_json, progress
from smallbert.cli.progress import Progress
from smallbert.errors import UserError


def serve(
    folder: Annotated[str, typer.Argument(help="An ONNX export, or a model, which is exported first.")],
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; 0.0.0.0 is all addresses.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    batch: Annotated[int, typer.Option("--batch", help="Texts in a batch, of any requests.", min=1)] = 32,
    wait_ms: Annotated[
        float, typer.Option("--wait-ms", help="Milliseconds a text waits for others to join its batch.", min=0)
    ] = 2.0,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads of the model (all cores).", min=1)] = None,
    queue: Annotated[
        int, typer.Option("--queue", help="Texts waiting or running; beyond that, answer 503.", min=1)
    ] = 1024,
    max_texts: Annotated[int, typer.Option("--max-texts", help="Most texts in one request.", min=1)] = 64,
    max_body: Annotated[int, typer.Option("--max-body", help="Most bytes in one request.", min=1)] = 1_000_000,
    length: Annotated[int | None, typer.Option("--length", help="Truncate texts to this many tokens.", min=3)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse longer texts instead of truncating them.")] = False,
    unanswerable: Annotated[
        bool, typer.Option("--unanswerable", help="A question may have no answer (models of squad2).")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds one request may take.", min=0.001)] = 30.0,
    drain: Annotated[int, typer.Option("--drain", help="Seconds to finish requests when stopped.", min=0)] = 30,
    json: Json = False,
) -> None:
    """Answer requests over HTTP with a trained model: POST /predict, GET /health, GET /metrics."""
    from smallbert.serving import run

    run.check_installed()
    if max_texts > queue:
        raise UserError(f"--max-texts {max_texts} would never fit into --queue {queue}; make the queue longer")
    run.interrupt_on_terminate()
    with run.bind(host, port) as bound:
        with progress() as say:
            say("starting")
            from smallbert.onnxfile.exactness import INEXACT
            from smallbert.serving.app import Limits, make_app
            from smallbert.serving.loading import load_model

            with _exported(folder, say) as ready:
                say("loading the model")
                model = load_model(ready, threads or run.usable_threads(), length, unanswerable)
        limits = Limits(batch, wait_ms / 1000, queue, max_texts, max_body, timeout, strict)

        def when_ready(url: str) -> None:
            if json:
                print_json({"url": url, **model.facts()})
            else:
                doubt = "" if model.exact else f". {INEXACT}"
                say.show(f"Serving {folder} ({model.kind}) on {url}; stop it with Ctrl-C{doubt}")
            sys.stdout.flush()

        run.run_app(make_app(model, limits), bound, drain, when_ready)


@contextmanager
def _exported(folder: str, say: Progress) -> Iterator[Path]:
    """The folder itself if it is an ONNX export, else one for as long as it takes to load it."""
    if (Path(folder).expanduser() / "model.onnx").is_file():
        yield Path(folder).expanduser()
        return
    from smallbert.serving.loading import NO_HEAD
    from smallbert.serving.run import export_aside, lacks_head
    from smallbert.sources import find_model

    found = find_model(folder, say.line)
    if lacks_head(found):
        raise UserError(f"{folder} {NO_HEAD}")
    say.line(f"exporting {found.name} to ONNX; to start sooner next time: smallbert export {folder} --to onnx --out …")
    with TemporaryDirectory(prefix="smallbert-serve-") as aside:
        made = Path(aside) / found.name
        if code := export_aside(found, made):
            raise typer.Exit(code)  # it has said why
        try:
            yield made
        except UserError as error:  # of a folder that nobody knows and that will be gone
            raise UserError(str(error).replace(str(made), folder)) from None
