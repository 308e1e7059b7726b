"""Texts without labels, for a teacher: more of them from a file, or the task's own with their labels hidden."""

from collections.abc import Collection, Iterator
from typing import Any, ClassVar, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.tasks.task import Split
from smallbert.texts.corpus import check_text, fingerprint_of_text, text_files, text_lines


class Unlabelled(Method):
    """Bring texts without labels to a phase with a teacher: those of a file, or the task's own.

    text: plain text file, or folder of them, one text per line; a tab separates two texts, spaces separate words
        to be tagged; '' brings none
    own: use of the task's own rows: 'labelled', they are read with their labels; 'unlabelled', without;
        'left out', they are not read; None: 'labelled' where a text is given, else 'unlabelled'
    """

    stage: ClassVar[int] = 5
    trains: ClassVar[bool] = True

    text: str = ""
    own: Literal["labelled", "unlabelled", "left out"] | None = None

    def check(self) -> None:
        """Something without labels."""
        if self.own in ("labelled", "left out") and not self.text:
            raise UserError(
                f"unlabelled: own={self.own!r} brings no rows without labels, and no text is given; say text='file.txt'"
            )

    def reads(self, marks: Collection[str] = ()) -> str:
        """The text."""
        return f" of {fingerprint_of_text(self.text, self.name)}" if self.text else ""

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """What text it was."""
        return {"text": fingerprint_of_text(self.text, self.name)} if self.text else {}

    def fits(self, phase: Any, steps: int | None) -> None:
        """Somebody who teaches, and something to read."""
        check_taught(phase, self.name)
        if self.text:
            check_text(self.text, self.name)
            if phase.task is not None and "train" in phase.task.splits:
                for _ in self._cells(phase.task.split("train").pairs is not None):
                    pass  # a wrong line is refused before anything is trained

    def rows(self, phase: Any, rows: Any) -> Any:
        """The task's rows and the new ones."""
        if rows is None:
            raise UserError("unlabelled brings texts to a task, and none was given: give --task")
        self.fits(phase, None)
        own = self.own or ("labelled" if self.text else "unlabelled")
        if own == "unlabelled":
            rows = Split(rows.texts, rows.pairs, [None] * len(rows), rows.ids)
        more = self._read(phase.task.kind, rows.pairs is not None) if self.text else None
        if more is not None:
            phase.notes.append(f"unlabelled brought {len(more):,} text{'s' * (len(more) != 1)} without labels")
        return more if own == "left out" else joined(rows, more)

    def _cells(self, paired: bool) -> Iterator[list[str]]:
        """The columns of each line that has any."""
        for line in filter(str.strip, text_lines(text_files(self.text, self.name))):
            cells = line.split("\t")
            if len(cells) != 1 + paired:
                raise UserError(
                    f"unlabelled: {self.text} has a line of {len(cells)} columns, {cells[0][:40]!r} …; this task has "
                    f"{'two texts a row, with a tab between them' if paired else 'one text a row, and no tabs'}"
                )
            yield cells

    def _read(self, kind: str, paired: bool) -> Split:
        cut = list(self._cells(paired))
        texts = [cells[0].split() if kind == "tag" else cells[0].strip() for cells in cut]
        pairs = [cells[1].strip() for cells in cut] if paired else None
        return Split(texts, pairs, [None] * len(cut), [f"unlabelled {number}" for number in range(len(cut))])


def check_taught(phase: Any, name: str) -> None:
    """Refuse rows without labels where nobody teaches them."""
    if not any(method.teaches for method in phase.methods):
        raise UserError(f"{name} brings rows without labels, which only a teacher can use; write {name}(…) + distill")


def joined(rows: Split, more: Split | None) -> Split:
    """The rows of both, one behind the other."""
    if more is None:
        return rows
    pairs = None if rows.pairs is None else [*rows.pairs, *(more.pairs or [])]
    return Split([*rows.texts, *more.texts], pairs, [*rows.labels, *more.labels], [*rows.ids, *more.ids])
