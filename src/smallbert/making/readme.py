"""The README.md that a saved model carries: what it is, its numbers, how it was made, how to use it."""

from __future__ import annotations

from smallbert.measuring.budget import show
from smallbert.measuring.card import MACHINERY_CHECK, Card, number
from smallbert.measuring.groups import NOTHING
from smallbert.measuring.pruned import weights_left


def model_readme(card: Card, layout: str) -> str:
    """A model's README as Markdown, all of it from its card."""
    title = f"# {card['model']} for {card['task']}{', ' * bool(card['preset'])}{card['preset'] or ''}"
    lines = [title, "", f"Made by smallbert from {card['model']} for the task {card['task']}."]
    if card["kind"] == MACHINERY_CHECK:
        lines += ["", "**A machinery check: a tiny random model on toy data. Its scores mean nothing.**"]
    if card["status"] != "ok":
        lines += ["", f"**This run is called {card['status']}: {card['why']}.**"]
    lines += ["", "| measured | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in numbers(card))]
    note = [f"- about the data: {card['task_note']}"] if card["task_note"] else []
    lines += ["", "## How it was made", "", f"    {card['recipe']}", "", f"- seed {card['seed']}", *note]
    lines += [f"- {note}" for note in dict.fromkeys((card["trained"] or {}).get("notes") or [])]
    lines += [f"- command: `{card['command']}`"] if card["command"] else []
    lines += [f"- {', '.join(f'{name} {version}' for name, version in card['versions'].items())}"]
    lines += ["", "## How to use it", "", *_usage(layout)]
    return "\n".join(lines) + "\n"


def numbers(card: Card) -> list[tuple[str, str]]:
    """What was measured, in words: [("accuracy on dev (872 examples)", "91.2 ± 1.0"), ("size of its files", …), …]."""
    rows = []
    for metric, score in (card["scores"] or {}).items():
        error = "" if score["stderr"] is None else f" ± {score['stderr']:.1f}"
        shown = "-" if score["value"] is None else f"{score['value']:.1f}{error}"
        rows.append((f"{metric} on {card['split']} ({score['n']:,} examples)", shown))
    as_given = card["recipe"] == NOTHING and number(card, "size") == card["model_bytes"]
    size = "size of the files given" if as_given else "size of its files"
    for name, title in (("size", size), ("parameters", "parameters"), ("macs", "multiplications")):
        if (value := number(card, name)) is not None:
            where = f", {card['macs']['length']} tokens" if name == "macs" else ""
            rows.append((title + where, show(name, value)))
    if (left := weights_left(card)) is not None and left.is_pruned:
        rows.append(("weights left, of the layers' matrices / of the whole model", f"{left} %"))
    if (latency := card["latency"]) is not None:
        where = f"batch {latency['batch']}, {latency['length']} tokens, {latency['threads']} CPU thread(s)"
        rows.append((f"median time, {where}", show("latency", latency["p50_ms"])))
    return rows


def _usage(layout: str) -> list[str]:
    ours = [
        "With smallbert (`FOLDER` is the folder this file is in):",
        "",
        "```python",
        "from smallbert import load, predict",
        "",
        'encoder, texts = load("FOLDER"), ["a first text", "a second one"]',
        "predictions = predict(encoder, texts)",
        "print(predictions)",
        "```",
        "",
        'A pair of texts is `("one", "other")`, a question `("question", "context")`.',
        "",
        "Score it on any data of its task: `smallbert eval FOLDER --task TASK`.",
    ]
    if layout != "huggingface":
        return [*ours, "", "transformers does not support its shape, so it loads with smallbert only."]
    theirs = [
        "",
        "With transformers alone, which gave the same scores when this folder was saved:",
        "",
        "```python",
        "import transformers",
        "",
        'config = transformers.AutoConfig.from_pretrained("FOLDER")',
        'model = getattr(transformers, config.architectures[0]).from_pretrained("FOLDER")',
        'tokenizer = transformers.AutoTokenizer.from_pretrained("FOLDER")',
        "```",
    ]
    return [*ours, *theirs]
