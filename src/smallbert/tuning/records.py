"""What is kept of every trial: a line of trials.jsonl, and which of them is best."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smallbert.machine.files import write_text

FILE = "trials.jsonl"
OK, PRUNED, DIVERGED, FAILED, DIED, RUNNING, WAITING = (
    "ok", "pruned", "diverged", "failed", "died", "running", "waiting",
)  # fmt: skip
SURPLUS = "surplus"  # begun by two processes at once where only one more was missing
TRIES = 2  # processes that a trial may kill before it is given up


class Record(NamedTuple):
    """One trial: what was drawn, how it ended, and its scores on the way (share of training in percent -> score)."""

    trial: int
    status: str
    score: float | None
    error: float | None
    drawn: dict[str, Any]
    recipe: str
    looks: dict[int, float]
    why: str | None
    seconds: float | None
    by: str | None
    tries: int = 1

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do for it."""
        given_up = self.status == DIED and self.tries >= TRIES
        return given_up or self.status in (OK, PRUNED, DIVERGED, FAILED)


def record_of(trial: Any) -> Record:
    """A trial of the storage as a record; one that was cut short has the last score it had on the way."""
    about, state = trial.user_attrs, trial.state.name
    work, end = about.get("work", {}), about.get("end", {})
    status = {"RUNNING": RUNNING, "WAITING": WAITING}.get(state) or end.get("status", DIED)
    looks = {step: round(value, 4) for step, value in sorted(trial.intermediate_values.items())}
    score = end.get("score", next(reversed(looks.values()), None)) if status == PRUNED else trial.value
    why = end.get("why")
    if status == DIED:
        why = "it was interrupted" if about.get("interrupted") else "its process ended before it did"
    return Record(
        trial.number,
        status,
        score if status in (OK, PRUNED) else None,
        end.get("error"),
        work.get("drawn", {}),
        work.get("recipe", ""),
        looks,
        why,
        end.get("seconds"),
        about.get("by"),
        about.get("tries", 1),
    )


def records_of(study: Any) -> list[Record]:
    """All trials of a study so far, in the order they were begun; none that was surplus."""
    trials = study.get_trials(deepcopy=False)
    return [record for record in map(record_of, trials) if record.status != SURPLUS]


def best_of(records: Iterable[Record]) -> Record | None:
    """The best finished trial, the first of equals."""
    scored = [record for record in records if record.status == OK and record.score is not None]
    return max(scored, key=lambda record: (record.score, -record.trial), default=None)


def count(records: Iterable[Record]) -> dict[str, int]:
    """How many trials ended in which way."""
    return dict(Counter(record.status for record in records))


def write_records(records: Sequence[Record], out: Path) -> Path:
    """Write a line for every trial; the storage stays the truth, so that this may be done at any time.

    Processes are numbered there, since the names of machines are nobody's business.
    """
    numbers = {by: f"process {place}" for place, by in enumerate(dict.fromkeys(one.by for one in records if one.by), 1)}
    lines = [record._replace(by=numbers.get(record.by or ""))._asdict() for record in records]
    write_text(out / FILE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return out / FILE


def importances(records: Iterable[Record], groups: int = 5) -> dict[str, float | None]:
    """What share of the variance of scores a setting's value alone explains, by name, the largest first.

    Numbers are cut into a few groups of neighbours; the share that as many random groups would explain is taken off.
    None where too few trials differ in it, or no two are alike.
    """
    scored = [record for record in records if record.status == OK and record.score is not None]
    found = {name: _explained(scored, name, groups) for name in dict.fromkeys(n for r in scored for n in r.drawn)}
    return dict(sorted(found.items(), key=lambda pair: -1.0 if pair[1] is None else pair[1], reverse=True))


def _explained(records: Sequence[Record], name: str, groups: int) -> float | None:
    met = [record for record in records if name in record.drawn]
    values = [record.drawn[name] for record in met]
    scores = [float(record.score or 0.0) for record in met]
    keys: list[Any] = values
    if len(set(values)) > groups and all(isinstance(value, int | float) for value in values):
        ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
        keys = [ranks[value] * groups // len(ranks) for value in values]
    members: dict[Any, list[float]] = {}
    for key, score in zip(keys, scores, strict=True):
        members.setdefault(key, []).append(score)
    n, parts = len(scores), len(members)
    if parts < 2 or n <= parts:
        return None
    mean = sum(scores) / n
    total = sum((score - mean) ** 2 for score in scores)
    within = sum(sum((one - sum(own) / len(own)) ** 2 for one in own) for own in members.values())
    noise = within / (n - parts)
    return max(0.0, (total - within - (parts - 1) * noise) / (total + noise)) if total else 0.0
