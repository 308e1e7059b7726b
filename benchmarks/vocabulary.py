"""What `trim_vocabulary` leaves of a model when it reads a task's training texts, and how much of dev it still covers.

    python benchmarks/vocabulary.py e5-small --tasks sst2,mrpc,qqp --data data --out results/vocabulary

Nothing is trained. A row of dev with a piece that went is cut otherwise than before; all other rows get equal scores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.starting import start_from, task_from
from smallbert.measuring.cost import count_parameters
from smallbert.methods import METHODS
from smallbert.model.encoder import Encoder
from smallbert.model.folders import save_folder
from smallbert.texts.data import STUDENT, tokenise, usable_length


def file_mb(encoder: Encoder) -> float:
    """The weights on disk."""
    with tempfile.TemporaryDirectory() as folder:
        save_folder(encoder, Path(folder) / "model")
        return round((Path(folder) / "model" / "model.safetensors").stat().st_size / 1e6, 1)


def trim(encoder: Encoder, task: Any, least: int) -> dict[str, Any]:
    """One row: the encoder trimmed by a task's training texts."""
    method, small = METHODS["trim_vocabulary"](least=least), encoder.copy()
    plan = method.plan(encoder, task)
    small.apply_method(method, plan)
    method.fill(small, encoder, plan, task, 0)
    kept = np.unpackbits(np.frombuffer(bytes.fromhex(plan["kept"]), np.uint8)).astype(bool)
    length = usable_length(encoder, None, task)
    tokens = tokenise(encoder.tokenizer, task.split("dev"), task.kind, length).views[STUDENT]
    texts = np.repeat(np.arange(len(tokens.lengths)), tokens.lengths)
    row = {"task": task.name, "least": least, "pieces": plan["size"], "of": plan["of"]}
    row |= {"parameters": count_parameters(small)["total"], "before": count_parameters(encoder)["total"]}
    row |= {"file_mb": file_mb(small), "file_mb_before": file_mb(encoder)}
    row |= {f"{split}_tokens_percent": round(100 * share, 2) for split, share in plan["covered"].items()}
    rest = np.unique(texts[~kept[tokens.ids]])
    return row | {"dev_rows_with_a_piece_that_went": len(rest), "dev_rows": len(tokens.lengths)}


def main() -> None:
    """Trim, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", default="sst2,mrpc,qqp")
    parser.add_argument("--data")
    parser.add_argument("--least", default="1,5", help="how often a piece has to occur; several with commas")
    parser.add_argument("--out", type=Path)
    chosen, rows = parser.parse_args(), list[dict[str, Any]]()
    encoder = start_from(chosen.model, lambda text: None).encoder
    for task in (task_from(name, chosen.data) for name in chosen.tasks.split(",")):
        for least in map(int, chosen.least.split(",")):
            rows.append(trim(encoder, task, least))
            print(rows[-1], flush=True)
    if chosen.out:
        words = f"{Path(chosen.model).name} --tasks {chosen.tasks} --least {chosen.least}"
        record = {"benchmark": "vocabulary", "command": f"python benchmarks/vocabulary.py {words}", "rows": rows}
        write_json(chosen.out / "cpu.json", record | {"versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
