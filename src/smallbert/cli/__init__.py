"""The command line: `smallbert VERB`. Verbs only read options and call; this file turns errors into exit codes.

Exit codes: 0 done, 1 something failed, 2 something given cannot be used, 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from typing import Annotated

import typer

from smallbert.cli import benching, comparing, errors, features, looking, making, probing, serving, studying, tuning
from smallbert.cli.options import COMMAND
from smallbert.errors import RunError, UserError

ABOUT = """Make BERT-family encoders small, measure the results, and say which model is best.

Start with: smallbert demo
"""

app = typer.Typer(
    help=ABOUT,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verb in (
    comparing.demo,
    making.finetune,
    making.compress,
    making.evaluate,
    comparing.compare,
    studying.study,
    tuning.tune,
    probing.probe,
    errors.errors,
    looking.report,
    looking.inspect,
    looking.export,
    benching.bench,
    serving.serve,
    looking.list_,
):
    app.command({"evaluate": "eval", "list_": "list"}.get(_verb.__name__, _verb.__name__))(_verb)
app.add_typer(features.features, name="features")


def _print_version(asked: bool) -> None:
    if asked:
        from smallbert import __version__

        print(__version__)
        raise typer.Exit()


@app.callback()
def whole(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
) -> None:
    """Options of all verbs."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and give its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [word for word in given if word != "--debug"]
    COMMAND.set(shlex.join(["smallbert", *(" ".join(word.split()) if "\n" in word else word for word in given)]))
    if not debug:
        warnings.simplefilter("ignore")  # of libraries, to programmers
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123 - one process of a launch speaks for all
    try:
        code = app(given, standalone_mode=False)
        if code == 130:  # typer has caught it already
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        if debug and not hasattr(error, "format_message"):
            raise
        code, sentence = explain(error)
        if sentence:
            print(sentence, file=sys.stderr)
        return code


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the one sentence that an error is worth."""
    from smallbert.machine.files import is_full_disk

    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return 130, "interrupted; finished work is kept; repeat the same command to continue"
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if hasattr(error, "format_message"):  # what typer says about options
        return int(getattr(error, "exit_code", 2)), _about_options(error)
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123 - nobody reads on
        return 1, ""
    if isinstance(error, RunError):
        return 1, f"error: {error}"
    if is_full_disk(error):
        return 1, "error: the disk is full; what was there before is untouched"
    text = " ".join(str(error).split())[:300]
    if _is_memory(error):
        return 1, f"error: out of memory ({text}); use a smaller batch, length, width or model"
    return 1, f"error: {type(error).__name__}: {text}; add --debug to see where it comes from"


def _is_memory(error: BaseException) -> bool:
    from smallbert.machine.sharing import is_memory

    return isinstance(error, Exception) and is_memory(error)


def _about_options(error: BaseException) -> str:
    message = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
    if not message or "\n" in message:  # no verb was given, and the help was shown
        return message
    where = getattr(getattr(error, "ctx", None), "command_path", "smallbert")
    return f"error: {message[0].lower()}{message[1:]}{'' if message.endswith('?') else ';'} see {where} --help"
