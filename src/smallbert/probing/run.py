"""One model, many tasks: each part of the probing done once, kept on disk, and put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from smallbert import __version__
from smallbert.errors import UserError
from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.starting import Line, Say, Start, at_length, check_device, task_from
from smallbert.probing import layers, mixture
from smallbert.probing.features import POOLS, Features, digest, facts_of, file_name, read_features
from smallbert.probing.layers import chance, check_sklearn, probe_layers
from smallbert.probing.mixture import probe_mixture
from smallbert.probing.roles import arrange, check_rows, labels_of, repeated
from smallbert.recipes.registry import did_you_mean
from smallbert.tasks import TASKS, Task
from smallbert.tasks.probing import FILES, PLACES
from smallbert.tasks.reading import find_folder
from smallbert.texts.data import usable_length

FORMAT = 1
HEAD_EXAMPLES = 500


@dataclass(frozen=True)
class Work:
    """One task to probe a model on, and how."""

    start: Start
    task: Task
    out: Path
    pool: str
    seeds: Sequence[int]
    device: str
    say: Say

    @property
    def length(self) -> int:
        """At how many tokens texts are cut."""
        return usable_length(self.start.encoder, None, self.task)

    @cached_property
    def features(self) -> Features:
        """The hidden states of all texts, read when a part first asks for them."""
        options: dict[str, Any] = {"model": self.start.fingerprint, "pool": self.pool, "length": self.length}
        return read_features(self.start.encoder, self.task, self.out, **options, say=self.say)

    def tell(self, stage: str, done: int, total: int, info: str) -> None:
        """Say how far a stage of this task is."""
        self.say(f"{self.task.name}: {stage}", done, total, info)


def _layers(work: Work) -> dict[str, Any]:
    return {**probe_layers(work.features, work.task, work.seeds, work.say), "notes": work.features.notes}


def _mixture(work: Work) -> dict[str, Any]:
    found = probe_mixture(work.features, work.task, work.seeds, work.say, work.device)
    return {**found, "notes": work.features.notes}


def _heads(work: Work) -> dict[str, Any]:
    from smallbert.probing.heads import head_importance

    return _or_why(lambda: head_importance(work.start.encoder, work.task, _split(work), HEAD_EXAMPLES, work.tell))


def _attention(work: Work) -> dict[str, Any]:
    from smallbert.probing.attentions import attention_summaries

    return _or_why(lambda: attention_summaries(work.start.encoder, work.task, _split(work), HEAD_EXAMPLES, work.tell))


def _or_why(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured, or why it cannot be, so that one model without a task head does not stop all tasks."""
    try:
        return {**measure(), "why": None}
    except UserError as error:
        return {"why": str(error), "notes": []}


def _split(work: Work) -> str:
    return next(name for name in ("dev", "test", "train") if name in work.task.splits)


PARTS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "layers": _layers,
    "mixture": _mixture,
    "heads": _heads,
    "attention": _attention,
}
SETTINGS: dict[str, list[Any]] = {
    "layers": [layers.GRIDS, layers.STEPS, layers.MANY],
    "mixture": [mixture.STRENGTHS, "held with gamma", mixture.STEPS, mixture.BATCHES, mixture.RATE, mixture.SHARE_RATE],
}
FROZEN = ("layers", "mixture")  # the parts that read one vector a text, and have random seeds


def read_parts(text: str) -> list[str]:
    """Names of parts separated by commas, in the order in which they are done.

    >>> read_parts("mixture,layers")
    ['layers', 'mixture']
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in PARTS:
            hint = did_you_mean(name, PARTS)
            raise UserError(f"a probe has no part {name!r}.{hint} Write some of: {','.join(PARTS)}")
    if not asked:
        raise UserError(f"--parts is empty; write some of: {','.join(PARTS)}")
    return [name for name in PARTS if name in asked]


def read_tasks(names: str, data: str | None, examples: int | None, line: Line, **columns: str | None) -> list[Task]:
    """The tasks of these names, separated by commas; "all" stands for the probing tasks whose files are there."""
    asked: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        asked += _found(data) if name == "all" else [name] if name else []
    if not asked:
        raise UserError("--tasks is empty; write names with commas, your own file, or all")
    tasks = [
        task_from(name, data, examples, line, **({} if name in TASKS else columns)) for name in dict.fromkeys(asked)
    ]
    called = [task.name for task in tasks]
    for name in called:
        if called.count(name) > 1:
            raise UserError(f"two of the tasks are called {name}; rename one of the files, or probe one at a time")
    return tasks


def _found(data: str | None) -> list[str]:
    """The probing tasks whose files are in a folder."""
    there, errors = [], []
    for name, (stem, _) in FILES.items():
        try:
            find_folder(name, data, PLACES, [f"{stem}.txt"])
            there.append(name)
        except UserError as error:
            errors.append(error)
    if not there:
        raise errors[0]
    return there


def probe(
    start: Start,
    tasks: Sequence[Task],
    out: Path | str,
    *,
    parts: Sequence[str] = FROZEN,
    pool: str = "mean",
    seeds: Sequence[int] = (0, 1, 2),
    length: int | None = None,
    device: str | None = None,
    command: str = "",
    say: Say,
) -> dict[str, Any]:
    """Probe a model on tasks; what an earlier run finished is read from out/probe/<task>.<part>.json."""
    out = Path(out)
    tasks = [at_length(start, task, length) for task in tasks]
    _check(start, tasks, out, parts, pool, seeds)
    device = check_device(device) or ("cuda" if torch.cuda.is_available() else "cpu")
    start.encoder.to(device)
    found = []
    for task in tasks:
        work = Work(start, task, out, pool, list(dict.fromkeys(seeds)), device, say)
        entry = _about(work)
        for part in PARTS:  # what earlier runs found out stays on the page
            result = _once(work, part) if part in parts else _kept(work, part)
            entry |= {} if result is None else {part: result}
        found.append(entry)
    return {
        "probe": FORMAT,
        "command": command,
        "model": start.name,
        "model_fingerprint": start.fingerprint,
        "family": start.encoder.family,
        "layers": len(start.encoder.order),
        "pool": pool,
        "seeds": list(dict.fromkeys(seeds)),
        "parts": [part for part in PARTS if all(part in entry for entry in found)],
        "tasks": found,
        "versions": versions(),
        "machine": machine(),
    }


def _about(work: Work) -> dict[str, Any]:
    """What a reader must know of a task to read its numbers."""
    task = work.task
    entry: dict[str, Any] = {"task": task.name, "kind": task.kind, "metric": task.metrics[0], "note": task.note}
    entry |= {"fingerprint": task.fingerprint, "length": work.length, "classes": len(task.labels) or None}
    if task.kind not in ("classify", "regress"):
        return entry
    roles = arrange(task)
    rows = {role: len(getattr(roles, role)[1]) for role in ("fit", "choose", "score")}
    entry |= {"rows": rows, "scored_on": roles.score[0], "chosen": roles.note, "chance": chance(task, roles)}
    return entry | {"repeated": repeated(task, roles)}


def _facts(work: Work, part: str) -> dict[str, Any]:
    """All that the result of a part depends on."""
    frozen = part in FROZEN
    task = work.task
    return {
        **facts_of(work.start.encoder, task, work.start.fingerprint, work.pool if frozen else "", work.length),
        "labels": digest({name: split.labels for name, split in task.splits.items()}),
        "part": part,
        "seeds": list(work.seeds) if frozen else [],
        "version": [FORMAT, __version__],
        "settings": digest(SETTINGS.get(part)),
    }


def _path(work: Work, part: str) -> Path:
    return work.out / "probe" / f"{file_name(work.task.name)}.{part}.json"


def _kept(work: Work, part: str) -> dict[str, Any] | None:
    """What an earlier run found from the same things."""
    try:
        kept = json.loads(_path(work, part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return dict(kept["result"]) if kept.get("facts") == _facts(work, part) else None


def _once(work: Work, part: str) -> dict[str, Any]:
    """The result of one part: read if it was computed from the same things, else computed and written down."""
    result = _kept(work, part)
    if result is None:
        result = PARTS[part](work)
        write_json(_path(work, part), {"facts": _facts(work, part), "result": result})
    return result


def _check(
    start: Start, tasks: Sequence[Task], out: Path, parts: Sequence[str], pool: str, seeds: Sequence[int]
) -> None:
    """Refuse what cannot be done before anything long begins."""
    if pool not in POOLS:
        raise UserError(f"--pool was given {pool!r}; write {' or '.join(POOLS)}")
    if not seeds or min(seeds) < 0:
        raise UserError("--seeds needs whole numbers of 0 or more, such as 0,1,2")
    if start.encoder.tokenizer is None:
        raise UserError(f"model {start.name} has no tokenizer; put tokenizer.json beside its weights")
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / "probe").is_dir()):
        raise UserError(f"{out} holds something other than an earlier probe; write another --out")
    if not set(FROZEN) & set(parts):
        return
    if "layers" in parts:
        check_sklearn()
    for task in tasks:
        if task.kind not in ("classify", "regress"):
            raise UserError(
                f"task {task.name} is of kind {task.kind}; layers and mixtures are probed with one label a text, "
                "so give a task of kind classify or regress, or write --parts attention"
            )
        check_rows(task, labels_of(task, arrange(task))["fit"])
