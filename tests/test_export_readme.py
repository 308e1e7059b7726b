"""What stands in the README of an export runs, and prints what the model itself predicts."""

import random
import re
import subprocess
import venv
from dataclasses import replace

import pytest
import torch
from toys import daily, run, scores_of, small, toy_task

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from smallbert.export import export_hugging_face, export_onnx
from smallbert.measuring.evaluate import predict
from smallbert.model.folders import load_folder, save_folder
from smallbert.tasks.task import Split
from smallbert.texts.data import longest_input, tokenise
from smallbert.tiny import WORDS

KINDS = ("classify", "pair", "regress", "tag", "answer")
ROWS = 8
SIGNS = ["Film,", "LOVELY", "good;", "-", "(really)."]  # more tokens than words, and other letters than tokens have


def draw_questions(count=24):
    """Questions on texts of one word up to some windows."""
    draw = random.Random(0)
    lengths = [draw.choice((1, 4, 12, 40, 150)) for _ in range(count)]
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in lengths]
    pairs = [" ".join(draw.choices(WORDS + 4 * SIGNS, k=length)) for length in lengths]
    return Split(texts, pairs, [None] * count, [str(number) for number in range(count)])


def export_both(kind, place):
    """An untrained model of a kind, whose answers are anywhere, and its two exports."""
    # At this length windows of a long context overlap as those of models of usual length do: by a quarter.
    encoder = run("head", small(layers=1, max_position_embeddings=67), toy_task(kind)).encoder
    with torch.no_grad():
        encoder.head.out.weight.mul_(30)
        encoder.head.out.bias -= scores_of(encoder, toy_task(kind)).flatten(0, -2).mean(0)  # no class is always ahead
    save_folder(encoder, place / "model")
    export_onnx(place / "model", place / "onnx")
    export_hugging_face(place / "model", place / "plain")


def snippet_of(folder):
    return re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]


def asked_of(kind, task):
    """Rows to ask: those of a toy task, with other words and signs among them, and for answers longer ones."""
    rows = draw_questions() if kind == "answer" else task.split("dev").take(range(ROWS))
    if kind == "tag":
        return replace(rows, texts=[["Film-ending,", *words, "unknownword", "grey"] for words in rows.texts])
    return rows


def lines_for(kind, rows):
    """The line of a snippet that says what is asked, for these rows; for answers one line a row."""
    if kind == "answer":
        return [f"question, context = {asked!r}" for asked in zip(rows.texts, rows.pairs, strict=True)]
    return [f"texts = {rows.texts if rows.pairs is None else list(zip(rows.texts, rows.pairs, strict=True))!r}"]


def asking(snippet, kind, line):
    """A snippet in which that line is another."""
    begin = "question, context = " if kind == "answer" else "texts = "
    changed, count = re.subn(f"^{begin}.*$", lambda _: line, snippet, flags=re.MULTILINE)
    assert count == 1
    return changed


def printed(snippet):
    """What a snippet prints."""
    said = []
    exec(snippet, {"print": said.append})
    return said


def predicted(place, kind, task, rows):
    """What the project itself says, in the shape of what snippets print."""
    encoder = load_folder(place / "model")
    if kind == "tag":
        rows = replace(rows, labels=[[0] * len(words) for words in rows.texts])
    stream = tokenise(encoder.tokenizer, rows, task.kind, longest_input(encoder))
    found = predict(encoder, stream, task, rows)
    if kind == "tag":
        named = [[task.labels[tag] for tag in tags] for tags in found]
        return [list(zip(words, tags, strict=True)) for words, tags in zip(rows.texts, named, strict=True)]
    if kind == "answer":
        return found
    return [found.tolist() if kind == "regress" else [task.labels[row] for row in found]]


@pytest.mark.parametrize("kind", daily(KINDS, every=2))
def test_snippets_print_what_the_model_predicts(kind, tmp_path, monkeypatch):
    export_both(kind, tmp_path)
    task = toy_task(kind)
    rows = asked_of(kind, task)
    wanted = predicted(tmp_path, kind, task, rows)
    assert len({str(one) for one in (wanted if kind == "answer" else wanted[0])}) > 1  # it tells them apart
    for way in ("onnx", "plain"):
        snippet = snippet_of(tmp_path / way)
        monkeypatch.chdir(tmp_path / way)
        found = [one for line in lines_for(kind, rows) for one in printed(asking(snippet, kind, line))]
        assert found == ([pytest.approx(wanted[0], abs=1e-5)] if kind == "regress" else wanted)
        assert len(snippet.strip().splitlines()) <= (20 if kind == "answer" else 16)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The Python of a virtual environment that has what the README says, and nothing of this one."""
    place = tmp_path_factory.mktemp("elsewhere")
    venv.create(place, system_site_packages=False, with_pip=True)
    python = place / "bin" / "python"
    install = [python, "-I", "-m", "pip", "install", "--quiet", "onnxruntime", "tokenizers", "numpy"]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip could not install: {installed.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_snippets_run_where_no_torch_is_installed(kind, elsewhere, tmp_path):
    looks = "from importlib.util import find_spec; print([*map(find_spec, ('torch', 'transformers', 'smallbert'))])"
    assert run_python(elsewhere, looks, tmp_path) == "[None, None, None]"
    export_both(kind, tmp_path)
    rows, snippet = asked_of(kind, toy_task(kind)), snippet_of(tmp_path / "onnx")
    found = [run_python(elsewhere, asking(snippet, kind, line), tmp_path / "onnx") for line in lines_for(kind, rows)]
    wanted = predicted(tmp_path, kind, toy_task(kind), rows)
    if kind == "regress":
        assert [float(one) for one in found[0].strip("[]").split()] == pytest.approx(wanted[0], abs=1e-5)
    else:
        assert "\n".join(found) == "\n".join(map(str, wanted))


def run_python(python, code, place):
    """What some code prints, run by another Python that sees nothing of this one's packages."""
    ran = subprocess.run([python, "-I", "-c", code], cwd=place, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
