"""Every official format is read exactly, a user's own files are understood, and bad input gets one clear sentence."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from smallbert.errors import UserError
from smallbert.tasks import TASKS, Split, Task, hold_out, load_task
from smallbert.tasks.derived import CHOOSE, with_choice

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", TASKS)
def test_every_known_task_reads_its_sample(name: str) -> None:
    task = load_task(name, DATA)
    dev = task.split("dev")
    assert len(dev) > 1 or name in ("depth", "content", "top", "tense", "subj", "obj", "somo", "coord")
    assert (task.kind, task.metrics) == (TASKS[name].kind, TASKS[name].metrics)
    assert 0 <= task.chance <= 100 and len(task.fingerprint) == 16
    if task.kind == "classify":
        assert set(dev.labels) <= set(range(len(task.labels)))
    assert "official" in task.note or "SentEval" in task.note, "a sample is never passed off as the official data"


def test_list_of_tasks_reads_no_data_and_no_torch() -> None:
    code = "import sys, smallbert.tasks as t; print(len(t.TASKS), 'torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["21", "False", "False"]


def test_glue_quotes_are_ordinary_characters() -> None:
    assert load_task("sst2", DATA).split("dev").texts[0] == '" a small wonder '
    assert load_task("sst2", DATA).split("train").texts[4] == '" no " , said everyone leaving '
    assert load_task("mrpc", DATA).split("dev").pairs == [
        '" On Monday the road was shut .',
        "Nobody was hurt .",
        "There was a sharp fall in shares .",
    ]


def test_cola_has_no_header_and_mrpc_a_byte_order_mark() -> None:
    cola = load_task("cola", DATA).split("dev")
    assert cola.texts[0] == "We sat by the river." and cola.labels == [1, 0, 1]
    assert load_task("mrpc", DATA).split("dev").labels == [1, 0, 1]


@pytest.mark.parametrize(
    ("name", "split", "labels", "classes"),
    [
        ("mnli", "dev", [2, 0, 1, 1], ("entailment", "neutral", "contradiction")),
        ("mnli", "train", [0, 2, 1], ("entailment", "neutral", "contradiction")),
        ("snli", "dev", [1, 2, 0], ("entailment", "neutral", "contradiction")),
        ("rte", "dev", [1, 0, 1], ("entailment", "not_entailment")),
        ("qnli", "dev", [1, 0], ("entailment", "not_entailment")),
        ("qqp", "train", [1, 0, 1], ("not_duplicate", "duplicate")),
        ("stsb", "dev", [3.8, 0.2], ()),
        ("length", "dev", [1, 2, 2], ("0", "9", "10")),
        ("bshift", "test", [1, 0], ("I", "O")),
    ],
)
def test_labels_have_the_order_of_the_hub(name: str, split: str, labels: list, classes: tuple) -> None:
    task = load_task(name, DATA)
    assert task.split(split).labels == labels and task.labels == classes


def test_notes_say_what_is_not_official() -> None:
    assert "train is train_subset_3.tsv" in load_task("mnli", DATA).note
    assert "train is train_rebuilt.tsv" in load_task("qnli", DATA).note
    assert "not the GLUE split" in load_task("qqp", DATA).note
    assert "1 empty text in dev" in load_task("qqp", DATA).note
    assert "1 broken or without gold label" in load_task("qqp", DATA).note
    snli = load_task("snli", DATA)
    assert "dev is test.tsv" in snli.note and len(snli.split("train")) == 3, "the row without gold label is left out"
    with pytest.raises(UserError, match="no split 'test'"):
        snli.split("test")


def test_official_sizes_leave_no_note(tmp_path: Path) -> None:
    for split, count in (("train", 2490), ("dev", 277)):
        rows = [f"{row}\tone\ttwo\t{('entailment', 'not_entailment')[row % 2]}" for row in range(count)]
        (tmp_path / f"{split}.tsv").write_text("index\tsentence1\tsentence2\tlabel\r\n" + "\r\n".join(rows), newline="")
    task = load_task("rte", tmp_path)
    assert task.note == "" and task.split("dev").labels[:2] == [0, 1], "Windows line ends are no part of a label"
    assert task.chance == pytest.approx(100 * 139 / 277)


def test_files_are_found_from_any_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = (DATA, DATA / "glue", DATA / "glue" / "SST-2")
    assert len({load_task("sst2", place).fingerprint for place in places}) == 1
    assert "rebuilt/tree_depth" in load_task("depth", DATA / "probing" / "rebuilt").note
    monkeypatch.setenv("SMALLBERT_DATA", str(DATA))
    assert load_task("squad").split("dev").ids == ["c1", "c2"]
    monkeypatch.delenv("SMALLBERT_DATA")
    with pytest.raises(UserError, match=r"--data FOLDER.*glue/SST-2/train\.tsv"):
        load_task("sst2")
    with pytest.raises(UserError, match=r"looked for train\.tsv or dev\.tsv in .*glue/SST-2"):
        load_task("sst2", tmp_path)


def test_squad_answers_and_unanswerable_questions() -> None:
    squad, squad2 = load_task("squad", DATA), load_task("squad2", DATA)
    assert squad.split("dev").labels[0] == {"text": ["Spain", "in Spain"], "answer_start": [17, 14]}
    assert squad2.unanswerable and not squad.unanswerable and squad.length == 384
    assert squad2.split("dev").labels[1] == {"text": [], "answer_start": []}, "plausible answers are no answers"
    assert squad2.chance == 50 and squad.chance == 0
    with pytest.raises(UserError, match="squad2 has no split 'train' here; it has: dev"):
        squad2.split("train")


def test_hold_out_is_stratified_repeatable_and_complete() -> None:
    labels = [0] * 60 + [1] * 30 + [2] * 10
    split = Split([str(row) for row in range(100)], None, labels, [str(row) for row in range(100)])
    rest, held = hold_out(split, 0.1, seed=3, kind="classify")
    assert Counter(held.labels) == {0: 6, 1: 3, 2: 1} and set(rest.ids) | set(held.ids) == set(split.ids)
    assert hold_out(split, 0.1, 3, "classify")[1] == held != hold_out(split, 0.1, 4, "classify")[1]
    rare = Split(list("abcdef"), None, list(range(6)), list("abcdef"))
    assert len(hold_out(rare, 0.34, 0, "classify")[1]) == 2, "classes of one row still give the share asked for"


def test_hold_out_keeps_a_context_on_one_side() -> None:
    answers = [{"text": [], "answer_start": []}] * 40
    split = Split(["?"] * 40, [str(row % 8) for row in range(40)], answers, [str(row) for row in range(40)])
    rest, held = hold_out(split, 0.25, 0, "answer")
    assert rest.pairs and held.pairs and not set(rest.pairs) & set(held.pairs) and len(held) == 10


def test_a_part_of_train_to_choose_by_is_not_trained_on() -> None:
    task = load_task(DATA / "own" / "reviews.csv")
    changed = with_choice(task, 0.4)
    held, rest = changed.split(CHOOSE), changed.split("train")
    assert sorted(held.ids + rest.ids) == sorted(task.split("train").ids) and changed.split("dev") == task.split("dev")
    assert changed.fingerprint != task.fingerprint and f"choose is {len(held)} whole rows of train" in changed.note
    assert with_choice(task, 0.4) == changed and len(with_choice(task, 0.4, most=1).split(CHOOSE)) == 1


def _choosing(texts: list, pairs: list[str] | None, share: float) -> tuple[Split, Split]:
    """What is left to train on, and what is scored, of a task with these texts."""
    labels = [row % 2 for row in range(len(texts))]
    train = Split(texts, pairs, labels, [str(row) for row in range(len(texts))])
    task = Task("own", "classify", ("no", "yes"), ("accuracy",), 50.0, 128, "", "0", splits={"train": train})
    changed = with_choice(task, share)
    return changed.split("train"), changed.split(CHOOSE)


def test_no_phrase_of_a_sentence_to_choose_by_is_trained_on() -> None:
    sentences = [f"It was {word} , the {word} film number {place} ." for place, word in enumerate("abcdefghij")]
    phrases = [f"the {word} film number" for word in "abcdefghij"] + [f"WAS {word}" for word in "abcdefghij"]
    rest, held = _choosing([*phrases, *sentences, "number", "film number"], None, 0.2)
    assert len(held) == 2 and set(held.texts) <= set(sentences), "whole sentences, not their phrases"
    for sentence in held.texts:
        word = sentence.split()[2]
        assert not {f"the {word} film number", f"WAS {word}", "film number", "number"} & set(rest.texts)
    assert len(rest) == 32 - 2 * 3 - 2, "all else is still trained on"


def test_texts_of_pairs_to_choose_by_are_not_trained_on() -> None:
    firsts = [f"premise {row // 3}" for row in range(30)]
    seconds = ["a common guess" if row % 10 == 0 else f"guess {row}" for row in range(30)]
    rest, held = _choosing([*firsts, "Guess 4."], [*seconds, "premise 7"], 0.2)
    trained = {text.lower().strip(".") for text in [*rest.texts, *(rest.pairs or [])]}
    assert len(held) == 6 and not trained & {*held.texts, *(held.pairs or [])}
    assert 31 - len(rest) <= 12, "train never loses more than twice the share"


def test_a_text_that_nearly_all_rows_share_leaves_nothing_to_choose_by() -> None:
    with pytest.raises(UserError, match=r"20 % of train would go.*30 rows and those that share text go together"):
        _choosing([f"review {row}" for row in range(30)], ["service"] * 30, 0.1)


def test_own_csv_is_guessed_and_said() -> None:
    task = load_task(DATA / "own" / "reviews.csv")
    assert task.kind == "classify" and task.labels == ("1", "5") and task.name == "reviews"
    texts = task.split("train").texts + task.split("dev").texts
    assert 'Warm, funny and "true".' in texts and "Two\nlines of praise." in texts
    assert {"r1", "r10"} <= set(task.split("train").ids + task.split("dev").ids)
    said = ("text column 'Review'", "label column 'Stars'", "kind 'classify'", "9 train, 1 dev rows", "1 empty text")
    for part in said:
        assert part in task.note
    assert "guessed by name" not in load_task(DATA / "own" / "reviews.csv", text="Review", label="Stars").note


def test_own_folder_of_tagged_words() -> None:
    task = load_task(DATA / "own" / "entities")
    assert task.kind == "tag" and task.metrics == ("f1", "accuracy")
    assert task.labels == ("B-city", "B-name", "I-name", "O") and task.split("train").labels[0] == [1, 2, 3, 0]


def test_same_rows_in_every_format_are_the_same_task(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"premise": f'say "{row}", twice', "hypothesis": "x\ty", "target": row % 3} for row in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        lines = [separator.join(rows[0])]
        lines += [separator.join('"' + str(value).replace('"', '""') + '"' for value in row.values()) for row in rows]
        (tmp_path / name).write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    tasks = [load_task(tmp_path / name) for name in ("a.csv", "a.tsv", "a.jsonl", "a.parquet")]
    assert all(task.splits == tasks[0].splits and task.labels == ("0", "1", "2") for task in tasks)
    assert tasks[0].split("dev").pairs == ["x\ty"] * 2


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([0.1 * row for row in range(12)], "regress"),
        ([1.0, 2.0, 1.0, 2.0], "classify"),
        ([0.5, 1.0] * 6, "classify"),
        (list(range(12)), "classify"),
        (["yes", "no"] * 3, "classify"),
    ],
)
def test_kind_is_guessed_from_labels(tmp_path: Path, labels: list, kind: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"text": "a", "label": label}) for label in labels))
    task = load_task(path)
    assert task.kind == kind and f"kind '{kind}' guessed" in task.note
    assert load_task(path).split("dev") == task.split("dev"), "the cut is always the same"


DRAWN = [f"a film number {row} of some words" for row in range(60)]
HALF = ["bad", "good"] * 30
DOUBTS = [
    (DRAWN, HALF, {}, None),
    (
        HALF,
        DRAWN,
        {},
        "60 different labels, and 'my text' only 2: .*--text 'my label' --label 'my text'",
    ),
    (HALF, DRAWN, {"kind": "classify"}, None),  # who says so may have it
    (HALF[:20], DRAWN[:20], {}, None),  # few enough for classes
    (DRAWN, DRAWN[::-1], {}, "60 different labels, in 60 rows, most of several words"),
    (DRAWN, [f"a premise of some words {row // 3}" for row in range(60)], {}, None),  # 20 of them
    (DRAWN, [f"a premise of some words {row % 21}" for row in range(60)], {}, "21 different labels, in 60 rows"),
    (DRAWN, [-row for row in range(60)], {}, "60 different labels, all numbers"),
    (DRAWN * 2, [f"a premise of some words {row // 3}" for row in range(120)], {}, "40 different labels, in 120 rows"),
    (DRAWN, list(range(60)), {}, "60 different labels, all numbers, in 60 rows: .*--kind regress"),
    (DRAWN, [max(row, 9) for row in range(60)], {}, "51 different labels, all numbers"),  # some of them twice
    (DRAWN, [f"name{row}" if row % 10 else DRAWN[row] for row in range(60)], {}, None),  # few of them long
    (DRAWN, list(range(60)), {"kind": "regress"}, None),
    (DRAWN, [row // 2 for row in range(60)], {}, None),  # two examples a class, of thirty
    (DRAWN, [f"card_{row}" for row in range(60)], {}, None),  # one of each, by names that a class may have
    (["a", "b", "c"] * 20, [f"card_{row % 30}" for row in range(60)], {}, "30 different labels, and 'my text' only 3"),
]


@pytest.mark.parametrize(("texts", "labels", "given", "told"), DOUBTS, ids=range(len(DOUBTS)))
def test_texts_and_numbers_are_not_taken_for_classes_unasked(tmp_path: Path, texts, labels, given, told) -> None:
    rows = [{"my text": text, "my label": label} for text, label in zip(texts, labels, strict=True)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {**given, "text": "my text", "label": "my label"}
    if told is None:
        many = f", {len(set(labels))} different ones" if "kind" not in given else ""
        assert many in load_task(tmp_path / "own.jsonl", **given).note
        return
    with pytest.raises(UserError, match=f"{told}.*classes all the same, write --kind classify"):
        load_task(tmp_path / "own.jsonl", **given)


def test_texts_of_a_pair_are_counted_together(tmp_path: Path) -> None:
    rows = [{"a": "yes", "b": text, "c": number % 30} for number, text in enumerate(DRAWN)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(load_task(tmp_path / "own.jsonl", text="a", pair="b", label="c").labels) == 30
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({**row, "b": "no"}) for row in rows))
    with pytest.raises(UserError, match="30 different labels, in only 1 different text;"):
        load_task(tmp_path / "own.jsonl", text="a", pair="b", label="c")


def test_own_questions_with_answers(tmp_path: Path) -> None:
    rows = [
        {"question": "Who?", "context": f"{name} did.", "answers": {"text": [name], "answer_start": [0]}}
        for name in "ABC"
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_task(tmp_path)
    assert task.kind == "answer" and task.metrics == ("f1", "em") and not task.unanswerable
    assert len(task.split("train")) == 2 and len(task.split("dev")) == 1
    rows[1]["answers"]["answer_start"] = [2]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match="row 2: the answer 'B' is not in its context at character 2"):
        load_task(tmp_path)


def test_test_file_never_becomes_dev(tmp_path: Path) -> None:
    for name, texts in (("train", "abcdefghij" * 2), ("test", "xyz")):
        lines = [f"{text},{row % 2}" for row, text in enumerate(texts)]
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "\n".join(lines))
    task = load_task(tmp_path)
    assert [len(task.split(name)) for name in ("train", "dev", "test")] == [18, 2, 3]
    assert not set(task.split("dev").texts) & set("xyz") and "our own split" in task.note


BAD = {
    "empty": ({"a.csv": b""}, "a.csv is empty"),
    "header only": ({"a.csv": b"text,label\n"}, "no rows"),
    "blank jsonl": ({"a.jsonl": b" \n\n"}, "is empty"),
    "ragged": ({"a.csv": b"text,label\na,1\nb,2,3\n"}, "line 3: 3 columns where the file has 2"),
    "open quote": ({"a.tsv": b'text\tlabel\n"a\t1\nb\t2\n'}, "line 3: .*save the rows as .jsonl"),
    "unknown columns": (
        {"a.csv": b"foo,bar,baz\na,1,2\n"},
        "cannot tell the text column .* foo, bar, baz; write --text NAME",
    ),
    "one class": ({"a.csv": b"text,label\na,1\nb,1\n"}, "every row of train has the label '1'"),
    "missing label": ({"a.csv": b"text,label\na,1\nb,\nc,2\n"}, "row 2: no value in the label column 'label'"),
    "nan label": ({"a.csv": b"text,label\na,0.5\nb,0.25\nc,NaN\n"}, "row 3: no value in the label"),
    "json nan": ({"a.jsonl": b'{"text": "a", "label": 1}\n{"text": "b", "label": NaN}\n'}, "row 2: no value"),
    "null text": ({"a.jsonl": b'{"text": "a", "label": 1}\n{"label": 2}\n'}, "row 2: None where a text"),
    "not json": ({"a.jsonl": b'{"text": "a", "label": 1}\n{"text": \n'}, "line 2: not JSON"),
    "not an object": ({"a.jsonl": b'{"text": "a", "label": 1}\n[1]\n'}, "line 2: not an object"),
    "latin-1": (
        {"a.csv": "text,label\na,1\ncafé,2\n".encode("latin-1")},
        "line 3: byte 0xe9 is not UTF-8; .*iconv -f WIN",
    ),
    "utf-16": ({"a.csv": "text,label\na,1\n".encode("utf-16")}, "iconv -f UTF-16"),
    "twice": ({"a.csv": b"text,text,label\na,b,1\n"}, "names a column twice"),
    "bad parquet": ({"a.parquet": b"nothing"}, "cannot read .* as parquet"),
    "words and tags": ({"a.jsonl": b'{"words": ["a", "b"], "tags": ["O"]}'}, "row 1: 2 words and 1 tags"),
    "unseen label": (
        {"train.csv": b"text,label\na,1\nb,2\n", "dev.csv": b"text,label\na,1\nb,3\n"},
        r"dev.csv, row 2: the label '3' is not one of the known ones: 1, 2",
    ),
    "two train files": ({"train.csv": b"text,label\na,1\n", "train.tsv": b""}, "more than one train file"),
    "no known file": ({"notes.txt": b"hello"}, r"holds no train.*there is: notes.txt"),
    "other columns in dev": ({"train.csv": b"text,label\na,1\nb,2\n", "dev.csv": b"txt,label\na,1\n"}, "mean 'txt'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_sentence(tmp_path: Path, case: str) -> None:
    files, message = BAD[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    lone = len(files) == 1 and not any(name.endswith(".txt") for name in files)
    with pytest.raises(UserError, match=message) as raised:
        load_task(tmp_path / next(iter(files)) if lone else tmp_path)
    assert "\n" not in str(raised.value)


def test_bad_names_and_settings() -> None:
    reviews = DATA / "own" / "reviews.csv"
    for arguments, message in (
        ({"name": "sst3"}, "did you mean 'sst2'"),
        ({"name": "SST-2"}, "did you mean 'sst2'"),
        ({"name": "nowhere/reviews.csv"}, "does not exist"),
        ({"name": "sst2", "data": DATA, "text": "sentence"}, "has its own columns"),
        ({"name": reviews, "text": "reviw"}, "no column 'reviw'; its columns are: Review, Stars, id; .*'Review'"),
        ({"name": reviews, "kind": "classfy"}, "not a kind of task.*classify"),
        ({"name": reviews, "kind": "answer"}, "needs the contexts"),
        (
            {"name": reviews, "text": "Review", "label": "id", "kind": "regress"},
            "row 1: the label 'r1' is not a number",
        ),
        ({"name": DATA / "own" / "entities" / "nothing.json"}, "does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            load_task(**arguments)


@pytest.mark.parametrize(
    ("file", "content", "name", "message"),
    [
        ("train.tsv", "sentence\tlabel\ngood\t1\nbad\n", "sst2", "line 3: 1 columns where the file has 2"),
        ("train.tsv", "sentence\tlabel\ngood\t1\nbad\tnegative\n", "sst2", "row 2: the label 'negative' .* 0, 1"),
        ("train.tsv", "text\tlabel\ngood\t1\n", "sst2", "no column 'sentence'; its columns are: text, label"),
        ("train.tsv", "sentence1\tsentence2\tscore\na\tb\tnan\n", "stsb", "row 1: the label is nan"),
        ("top_constituents.txt", "tr\tA\tone\ntr\tB\ttwo\nva\tC\tthree\n", "top", "row 3: the label 'C'"),
        ("top_constituents.txt", "xx\tA\tone\n", "top", "first column.* row 1: the label 'xx'"),
        ("dev-v1.1.json", '{"data": [', "squad", "line 1: not JSON"),
        ("dev-v1.1.json", '{"data": [{"qas": []}]}', "squad", "not a SQuAD file: 'paragraphs' is missing"),
    ],
)
def test_broken_official_files(tmp_path: Path, file: str, content: str, name: str, message: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        load_task(name, tmp_path)


def test_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("text,label\na,1\nb,2\na,1\nb,2\n")
    before = load_task(path).fingerprint
    path.write_text("text,label\na,1\nc,2\na,1\nb,2\n")
    assert load_task(path).fingerprint != before


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[data\]'"):
        load_task(tmp_path / "own.parquet")


def test_more_examples_than_there_are_is_said() -> None:
    from smallbert.making.starting import task_from

    said: list[str] = []
    task = task_from("sst2", str(DATA), 10**6, said.append)
    rows = len(task.split("train"))
    assert said == [f"sst2: of 1,000,000 train examples that were asked for there are {rows:,}; all are used"]
    said.clear()
    assert len(task_from("sst2", str(DATA), rows, said.append).split("train")) == rows and not said
