"""The report of a search: what was searched, what came of it, and what it gained where it was not chosen by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json, write_text
from smallbert.measuring.findings import BEYOND, Cell, Result, compare_cells, gather, p_value
from smallbert.report.figure import to_png
from smallbert.report.sheets import About, Sheet, seeds_sheet
from smallbert.tuning.records import DIED, DIVERGED, FAILED, OK, PRUNED, Record, best_of, count, importances

SHOWN = 5  # of the best trials
PICTURE = "tune.png"
ENDS = {OK: "went to the end", PRUNED: "pruned", DIVERGED: "diverged", FAILED: "failed", DIED: "died"}


def make_result(about: dict[str, Any], records: Sequence[Record], runs: Sequence[Result]) -> dict[str, Any]:
    """Everything there is to say about a search; `about` is what was asked for, `runs` are those of the final arms."""
    best, cells = best_of(records), gather(runs)
    # A default that died was drawn again: the one that tells most of it counts.
    alike = [one for one in records if one.drawn == about["defaults"]]
    default = min(alike, key=lambda one: (one.status != OK, one.score is None, one.trial), default=None)
    again = [one for one in records if one.status == DIED and not one.is_done]
    ended = {"done": sum(one.is_done for one in records), **count(one for one in records if one not in again)}
    result: dict[str, Any] = {
        "tune": 1,
        **about,
        "trials": {"asked": about["trials"], **ended, "tried_again": len(again)},
        "best": best and best._asdict(),
        "default": default and default._asdict(),
        "importances": {
            name: None if share is None else round(share, 3) for name, share in importances(records).items()
        },
        "final": [_arm(cell) for cell in cells],
        "gain": _gain(cells),
        "versions": versions(),
        "machine": machine(),
    }
    return {**result, "sentences": _sentences(result)}


def _arm(cell: Cell) -> dict[str, Any]:
    runs = [run._asdict() for run in cell.runs]
    return {"arm": cell.arm, "all": cell.all._asdict(), "survivors": cell.survivors._asdict(), "runs": runs}


def _gain(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """What the tuned recipe has over the default one, seed by seed."""
    if len(cells) != 2:
        return None
    pair = compare_cells(*cells)
    return {**pair.paired._asdict(), "error": pair.paired.error, "p": pair.flips}


def _sentences(result: dict[str, Any]) -> list[str]:
    trials, best, default = result["trials"], result["best"], result["default"]
    ends = ", ".join(f"{trials[status]} {words}" for status, words in ENDS.items() if trials.get(status))
    died = trials["tried_again"]
    again = f" ({died} that died {'was' if died == 1 else 'were'} tried again)" if died else ""
    told = f"{trials['done']} trials: {ends or 'none finished'}{again}"
    if best is None:
        return [f"{told}; no recipe can be chosen."]
    rows = f"the {result['rows']['held out']:,} rows held out of train"
    ours = "" if default is None or default["score"] is None else f", the default {default['score']:.2f}"
    said = [f"{told}; the best scores {best['score']:.2f} {result['metric']} on {rows} (trial {best['trial']}){ours}."]
    if default is not None and best["recipe"] == default["recipe"]:
        said.append("No other recipe tried is better than the default.")
    return [*said, *_final_sentences(result)]


def _final_sentences(result: dict[str, Any]) -> list[str]:
    means = {one["arm"]: one["all"] for one in result["final"]}
    if not means:
        return []
    told = " and ".join(f"{arm} {_mean(mean)}" for arm, mean in means.items())
    seeds = max(mean["n"] for mean in means.values())
    over = f"mean ± sd over {seeds} seeds other than that of the trials" if seeds > 1 else "one seed"
    said = f"On {result['split']}, which no trial has seen: {told} ({over})"
    gain, best, default = result["gain"], result["best"], result["default"]
    if gain is None or gain["value"] is None:
        return [f"{said}."]
    error = f" ± {gain['error']:.2f} (standard error, p = {p_value(gain['p'])})" if gain["error"] else ""
    shown = bool(gain["error"]) and abs(gain["value"]) > BEYOND * gain["error"]  # two seeds may agree by accident
    verdict = "" if shown else "; that is no more than chance can give with so few seeds"
    said += f": tuning gained {gain['value']:+.2f}{error}{verdict}."
    if default is None or default["score"] is None:
        return [said]
    seemed = best["score"] - default["score"]
    return [said, f"On the rows that chose it, the gain seemed to be {seemed:+.2f}."]


def _mean(mean: dict[str, Any]) -> str:
    if mean["value"] is None:
        return "has no score"
    return f"{mean['value']:.2f}" + ("" if mean["sd"] is None else f" ± {mean['sd']:.2f}")


def space_sheet(choices: Sequence[dict[str, Any]]) -> Sheet:
    """The space as a table."""
    rows = [[one["name"], one["kind"], one["range"], str(one["default"])] for one in choices]
    return Sheet("what is searched", ["setting", "kind", "range", "default"], rows, [])


def trials_sheet(result: dict[str, Any], records: Sequence[Record]) -> Sheet:
    """The best trials and the default one."""
    scored = [one for one in records if one.status == OK and one.score is not None]
    best = sorted(scored, key=lambda one: (-(one.score or 0.0), one.trial))[:SHOWN]
    default = [one for one in scored if one.drawn == result["defaults"] and one not in best][:1]
    names = [one["name"] for one in result["choices"]]
    rows = [
        [str(one.trial), f"{one.score:.2f} ± {one.error or 0.0:.2f}", *(str(one.drawn.get(name, "")) for name in names)]
        for one in [*best, *default]
    ]
    title = f"the best trials and the default, {result['metric']} on rows held out of train"
    return Sheet(title, ["trial", "score", *names], rows, ["± is the standard error from the number of rows"])


def final_sheet(result: dict[str, Any], runs: Sequence[Result]) -> Sheet | None:
    """A row a seed, a column an arm."""
    cells = gather(runs)
    if not cells:
        return None
    about = About("", result["split"], "", {cells[0].task: (result["metric"], "", None)}, [], judged=result["judged"])
    return seeds_sheet(cells, about)


def to_markdown(result: dict[str, Any], sheets: Sequence[Sheet], picture: str | None) -> str:
    """The whole report as one page."""
    parts = [f"# Tuning {result['model']} on {result['task']}", *result["sentences"]]
    parts.append(f"```bash\n{result['command']}\n```")
    recipes = [f"- space: `{result['space']}`", f"- default: `{result['default_recipe']}`"]
    recipes += [f"- tuned: `{result['best']['recipe']}`"] if result["best"] else []
    parts += ["\n".join(recipes), *([f"![{picture}]({picture})"] if picture else [])]
    for sheet in sheets:
        lines = [sheet.columns, ["---"] * len(sheet.columns), *sheet.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        parts += [f"## {sheet.title[0].upper()}{sheet.title[1:]}", table, *sheet.notes]
    if result["importances"]:
        shares = "\n".join(
            f"- {name}: {'too few trials to say' if share is None else f'{100 * share:.0f} %'}"
            for name, share in result["importances"].items()
        )
        parts += ["## Share of the variance of scores that each setting alone explains", shares]
    parts += ["## How it was done", "\n".join(f"- {sentence}" for sentence in result["protocol"])]
    return "\n\n".join(parts) + "\n"


def other_search(out: Path, about: dict[str, Any]) -> str | None:
    """A sentence where the report in a folder is of another search, which this one's will replace."""
    with suppress(OSError, ValueError):
        before = json.loads((out / "tune.json").read_text(encoding="utf-8"))
        if any(before.get(key) != about[key] for key in ("space", "model", "task")):
            return (
                f"the report in {out} is of another search, '{before.get('space')}'; its trials are in its database, "
                "and its own command writes it again, but from now on the report here is of this one"
            )
    return None


def write_tune(result: dict[str, Any], records: Sequence[Record], sheets: Sequence[Sheet], out: Path) -> list[Path]:
    """Write tune.json, tune.md and the picture; gives their paths."""
    drawn = find_spec("matplotlib") is not None and any(one.score is not None for one in records)
    if drawn:
        from smallbert.report.tuning_plot import draw

        to_png(draw(result, records), out / PICTURE)
    write_json(out / "tune.json", result)
    write_text(out / "tune.md", to_markdown(result, sheets, PICTURE if drawn else None))
    return [out / name for name in ("tune.md", "tune.json", *([PICTURE] if drawn else []))]
