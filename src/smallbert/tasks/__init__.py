"""Tasks: what to measure on. `TASKS` lists the known ones, `load_task` reads one, or a user's own file or folder.

>>> load_task("sst2", data="data").split("dev").texts[0]
>>> load_task("reviews.csv", text="review", label="stars").note
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path

from smallbert.errors import UserError
from smallbert.tasks import folder, glue, probing, squad
from smallbert.tasks.derived import hold_out
from smallbert.tasks.reading import READERS
from smallbert.tasks.task import KINDS, Row, Split, Task

__all__ = ["KINDS", "TASKS", "Row", "Split", "Task", "hold_out", "load_task"]

TASKS: Mapping[str, Row] = {**glue.ROWS, **squad.ROWS, **probing.ROWS}
_LOADERS: Mapping[str, Callable[[str, Path | str | None], Task]] = {
    **dict.fromkeys(glue.ROWS, glue.load),
    **dict.fromkeys(squad.ROWS, squad.load),
    **dict.fromkeys(probing.ROWS, probing.load),
}


def load_task(
    name: str | Path,
    data: str | Path | None = None,
    *,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    kind: str | None = None,
) -> Task:
    """Read a known task from its official files, or a user's own .csv .tsv .jsonl .parquet file or a folder of them.

    `data` is the folder to look in for a known task (by default what SMALLBERT_DATA says); `text`, `pair`, `label` and
    `kind` are for a user's own data, and are guessed (and the guess said in the task's note) where not given.
    """
    if str(name) in TASKS:
        if text or pair or label or kind:
            raise UserError(f"task {name} has its own columns and kind; leave out text, pair, label and kind")
        return _LOADERS[str(name)](str(name), data)
    path = Path(name)
    if path.exists():
        return folder.load(path, text=text, pair=pair, label=label, kind=kind)
    if path.suffix.lower() in READERS or len(path.parts) > 1:
        raise UserError(f"{path} does not exist; give a task name or an existing file or folder")
    near = get_close_matches(str(name).lower().replace("-", ""), TASKS, 1)
    hint = f"did you mean '{near[0]}'?" if near else f"known are: {' '.join(TASKS)}"
    raise UserError(f"'{name}' is neither a known task nor a file or folder; {hint}")
