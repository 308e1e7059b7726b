"""How fast the student of every preset reads on a CPU, and how many bytes it takes, against the teacher it is made of.

    python benchmarks/student_speed.py e5-small --data DATA --out results/student_speed

Time depends on shapes, not on what was learned, so these students are made by the recipes of students.py without their
teacher and hardly trained, on 8,000 rows of SST-2; their parameters are compared with those of the study's own. Which
weights a pruned student keeps is then another matter than in the study, how many is not. Each student runs as it is
saved, in float32, and as the two ONNX files `smallbert export` writes of it. In a round it takes turns with the teacher
in torch on one thread and one text; "faster" is the median over turns of the ratio in the same turn, and then over
rounds, beside which stand the least and the most.

A student with a vocabulary of its own cuts the same text into more pieces: "tokens" is how many times as many, on dev.
The record has times of texts of as many tokens each; table and picture divide by these, and so are of the same text.
What a student "keeps" is what the study's own kept in float32, as compression.py tells it. `--draw` only makes the
table and the picture of what was measured before. What was made in `--work` is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines promise AMX and do not have it

from compression import Student, draw, guessed, read_students
from students import NAMES, again, teach, without_teacher

from smallbert.bench.run import bench
from smallbert.bench.variants import make_variants, read_variant
from smallbert.errors import UserError
from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.run import run_recipe
from smallbert.making.starting import start_from, task_from
from smallbert.measuring.cost import count_macs, count_parameters
from smallbert.model.encoder import Encoder
from smallbert.model.folders import load_folder, save_folder
from smallbert.recipes.recipe import Phase, Recipe
from smallbert.report.figure import to_png
from smallbert.tasks import Task
from smallbert.tasks.derived import limit
from smallbert.texts.data import STUDENT, tokenise

TEACHER, TASK, EXAMPLES = "teacher", "sst2", 8000
EXPORTS = {"onnx": "onnx", "int8": "onnx-int8"}
LENGTHS = [32, 128]
AXIS = "times as fast as the teacher in torch on the same text: int8 in onnxruntime, 128 tokens, one CPU thread"
BRIEF = argparse.Namespace(teacher="finetune(epochs=0.1, batch=32)", epochs=0.1, batch=32, copies="")


def shorten(recipe: Recipe) -> Recipe:
    """The recipe with next to no text to read before the task."""
    phases = [
        [again(method, epochs=BRIEF.epochs) if method.name == "pretrain" else method for method in phase]
        for phase in recipe
    ]
    return Recipe([Phase(phase) for phase in phases])


def make(name: str, start: Encoder, task: Task, folder: Path) -> None:
    """Save the student of a preset, or the teacher, unless it was saved earlier."""
    if not folder.is_dir():
        recipe = Recipe(BRIEF.teacher) if name == TEACHER else shorten(without_teacher(teach(name, 1.0, BRIEF)))
        print(f"{name}: {recipe.brief()}", flush=True)
        save_folder(run_recipe(recipe, start, task, device="cpu").encoder, folder)


def tokens_of(encoder: Encoder, task: Task) -> int:
    """Into how many tokens it cuts the texts of dev."""
    return len(tokenise(encoder.tokenizer, task.split("dev"), task.kind, 512).views[STUDENT].ids)


def describe(name: str, work: Path, task: Task) -> dict[str, Any]:
    """What is known of a student before it runs; its ONNX files are written here, or it is said why not."""
    folder = work / name / "torch"
    encoder = load_folder(folder)
    row: dict[str, Any] = {
        "student": name,
        "parameters": count_parameters(encoder)["non_zero"],
        "multiplications": count_macs(encoder, LENGTHS[-1]),
        "tokens": tokens_of(encoder, task),
        "bytes, torch": read_variant(folder).bytes,
    }
    for way, export in EXPORTS.items():
        try:
            row[f"bytes, {way}"] = make_variants(folder, [export], work / name)[0].bytes
        except UserError as error:
            row["refused"] = str(error)
    return row


def measure_round(row: dict[str, Any], work: Path, seconds: float) -> dict[str, float]:
    """How many times as fast as the teacher in torch a student is: {"torch, 32": 2.0, …}."""
    folder = work / row["student"]
    models = [read_variant(work / TEACHER / "torch", "reference"), read_variant(folder / "torch")]
    models += [read_variant(folder / export, way) for way, export in EXPORTS.items() if f"bytes, {way}" in row]
    timed = bench(models, lengths=LENGTHS, seconds=seconds)["rows"]
    return {f"{one['name']}, {one['length']}": one["faster"] for one in timed if one["name"] != "reference"}


def faster(record: dict[str, Any], column: str) -> dict[str, float]:
    """How many times as fast as the teacher in torch each student reads the same text, in its own tokens."""
    whole = record["rows"][0]["tokens"]
    return {row["student"]: row[column] * whole / row["tokens"] for row in record["rows"] if column in row}


def to_table(record: dict[str, Any], students: Sequence[Student]) -> list[str]:
    """One line a student, fastest last, as docs/distillation.md has it."""
    columns = {
        column: faster(record, column) for column in (f"{way}, {n}" for way in ("torch", "int8") for n in LENGTHS)
    }
    lines = [f"| | MB | MB, int8 | tokens | {' | '.join(columns)} | keeps |", "|---" * (len(columns) + 5) + "|"]
    kept = {student.name: str(student.taught) for student in students}
    for row in sorted(record["rows"], key=lambda row: columns["torch, 128"][row["student"]]):
        name = row["student"]
        sizes = [f"{row[column] / 1e6:.1f}" if column in row else "" for column in ("bytes, torch", "bytes, int8")]
        times = [to_digits(found[name]) if name in found else "" for found in columns.values()]
        tokens = f"{row['tokens'] / record['rows'][0]['tokens']:.2f}"
        lines.append(f"| {' | '.join([f'`{name}`', *sizes, tokens, *times, kept.get(name, '')])} |")
    return lines


def to_digits(times: float) -> str:
    """With as many digits as are worth reading: 2.04 -> "2.0", 11.6 -> "12"."""
    return f"{times:.1f}" if times < 9.95 else f"{times:.0f}"


def compare_parameters(rows: Sequence[dict[str, Any]], students: Sequence[Student]) -> dict[str, list[float]]:
    """How many times fewer than the teacher, here and in the study."""
    study = {student.name: student.times for student in students}
    times = {row["student"]: rows[0]["parameters"] / row["parameters"] for row in rows[1:]}
    return {name: [round(here, 2), round(study[name], 2)] for name, here in times.items()}


def main() -> None:
    """Make, measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data")
    parser.add_argument("--presets", default=",".join(NAMES), help="of these, separated by commas")
    parser.add_argument("--study", default="results/students/e5-small/sst2", help="where it is seen what students keep")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each model at each length in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", default="runs/student_speed", help="folder of the students, which are made once")
    parser.add_argument("--out", default="results/student_speed")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    given = parser.parse_args()
    path, students = Path(given.out) / "cpu.json", read_students(Path(given.study))
    work = Path(given.work) / Path(given.model).name
    if not given.draw:
        task = limit(task_from(TASK, given.data), EXAMPLES)
        names = [TEACHER, *given.presets.split(",")]
        for name in names:
            make(name, start_from(given.model).encoder, task, work / name / "torch")
        rows = [describe(name, work, task) for name in names]
        fewer = compare_parameters(rows, students)
        print(f"times fewer parameters, here and in the study: {fewer}", flush=True)
        rounds: dict[str, dict[str, list[float]]] = {}
        for number in range(given.rounds):
            for row in rows:
                taken = rounds.setdefault(row["student"], defaultdict(list))
                for column, times in measure_round(row, work, given.seconds).items():
                    taken[column].append(round(times, 3))
                print(f"round {number + 1}: {row['student']} {dict(taken)}", flush=True)
        rows = [row | {column: median(all) for column, all in rounds[row["student"]].items()} for row in rows]
        about = f"--presets {given.presets} --rounds {given.rounds} --seconds {given.seconds:g}"
        command = f"python benchmarks/student_speed.py {Path(given.model).name} --data DATA {about}"
        most = os.environ["ONEDNN_MAX_CPU_ISA"]
        facts = {
            "benchmark": "student_speed",
            "command": command,
            "ONEDNN_MAX_CPU_ISA": most,
            "rows": rows,
            "rounds": rounds,
            "fewer": fewer,
        }
        write_json(path, {**facts, "versions": versions(), "machine": machine()})
    record = json.loads(path.read_text(encoding="utf-8"))
    print("\n".join(to_table(record, students)))
    times = faster(record, "int8, 128")
    shown = sorted(
        (student._replace(times=times[student.name]) for student in students if student.name in times),
        key=lambda student: student.times,
    )
    title = f"% of the teacher's score, {Path(given.model).name}, {Path(given.study).name}"
    to_png(draw(shown, title, guessed(Path(given.study)), AXIS, {}), path.with_name("speed.png"))  # type: ignore[arg-type]
    print(f"drawn in {path.with_name('speed.png')}")


if __name__ == "__main__":
    main()
