"""A served model gives what the model gives, whoever else asks; whatever is wrong is answered in a sentence."""

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import batch_of, run, small, toy_task

onnx = pytest.importorskip("onnx")
httpx = pytest.importorskip("httpx")
pytest.importorskip("onnxruntime")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from smallbert.bench.run import bench  # noqa: E402
from smallbert.bench.variants import read_variant  # noqa: E402
from smallbert.cli import main  # noqa: E402
from smallbert.errors import UserError  # noqa: E402
from smallbert.export import export_onnx  # noqa: E402
from smallbert.model.answering import learned_pairs  # noqa: E402
from smallbert.model.encoder import load  # noqa: E402
from smallbert.model.folders import save_folder  # noqa: E402
from smallbert.onnxfile import exactness  # noqa: E402
from smallbert.onnxfile.exactness import INEXACT  # noqa: E402
from smallbert.serving.app import Limits, make_app  # noqa: E402
from smallbert.serving.batching import Batcher  # noqa: E402
from smallbert.serving.loading import load_model  # noqa: E402
from smallbert.serving.metrics import Histogram  # noqa: E402
from smallbert.serving.model import Model, Piece  # noqa: E402
from smallbert.serving.predictions import predict  # noqa: E402
from smallbert.tiny import WORDS, make_tokenizer  # noqa: E402

OUTPUTS = {"classify": 2, "regress": 1, "tag": 3, "answer": 2}
LABELS = {"classify": ["bad", "good"], "tag": ["O", "GOOD", "BAD"]}
TABLE = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)  # what each token adds to each score


def toy_export(folder: Path, kind: str = "classify", length: int = 64) -> Path:
    """An export folder whose model is a table: each token's scores, or their sum; 1 more in a second text.

    What it should say can be worked out by hand, and it takes milliseconds to make.
    """
    folder.mkdir()
    table = TABLE[:, : OUTPUTS[kind]]
    nodes = [
        onnx.helper.make_node("Gather", ["table", "input_ids"], ["each"]),
        onnx.helper.make_node("Cast", ["token_type_ids"], ["second"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Unsqueeze", ["second", "last"], ["more"]),
        onnx.helper.make_node("Add", ["each", "more"], ["both"]),
        onnx.helper.make_node("Cast", ["attention_mask"], ["mask"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Unsqueeze", ["mask", "last"], ["real"]),
        onnx.helper.make_node("Mul", ["both", "real"], ["masked"]),
        onnx.helper.make_node("ReduceSum", ["masked", "middle"], ["scores"], keepdims=0)
        if kind in ("classify", "regress")
        else onnx.helper.make_node("Identity", ["masked"], ["scores"]),
    ]
    values = {"table": table, "last": np.array([2]), "middle": np.array([1])}
    inputs = ["input_ids", "attention_mask", "token_type_ids"]
    graph = onnx.helper.make_graph(
        nodes,
        "toy",
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch", "length"]) for name in inputs],
        [onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    make_tokenizer().save_pretrained(folder)
    facts = {"inputs": inputs, "outputs": ["scores"], "length": length, "kind": kind, "labels": LABELS.get(kind, [])}
    (folder / "export.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """exports("tag") gives the folder of a toy model of a kind."""
    made = {}
    root = tmp_path_factory.mktemp("exports")
    return lambda kind="classify": made.get(kind) or made.setdefault(kind, toy_export(root / kind, kind))


def scores_by_hand(text, kind: str = "classify") -> np.ndarray:
    """Scores of every token of a text, a pair or a list of words."""
    given = (text,) if isinstance(text, str) or kind == "tag" else text
    encoded = make_tokenizer()(*given, is_split_into_words=kind == "tag", return_token_type_ids=True)
    return TABLE[encoded["input_ids"], : OUTPUTS[kind]] + np.array(encoded["token_type_ids"])[:, None]


def draw_text(draw, count: int) -> str:
    return " ".join(draw.choice(WORDS, count))


def softmax(scores: np.ndarray) -> np.ndarray:
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)


def talk(model, conversation, limits=None):
    """Run `conversation(client)` against the app, without a socket."""

    async def go():
        app = make_app(model, limits)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://toy") as c:
            return await conversation(c)

    return asyncio.run(go())


def ask(model, body, limits=None, **options):
    """The answer to one request."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    return talk(model, lambda client: client.post("/predict", **given, **options), limits)


def predictions(model, texts, limits=None):
    answer = ask(model, {"texts": texts}, limits)
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def test_texts_and_pairs(exports):
    texts = ["the film was great", "dull", "", ["the plot was flat", "the cast was not"], "Great! " * 9]
    model = load_model(exports())
    found = predictions(model, texts)
    for text, one in zip(texts, found, strict=True):
        wanted = softmax(scores_by_hand(text).sum(0))
        assert list(one["probabilities"]) == ["bad", "good"] and not one["cut"]
        assert list(one["probabilities"].values()) == pytest.approx(wanted, abs=1e-5)
        assert one["label"] == ("bad", "good")[wanted.argmax()]
    assert ask(model, {"text": texts[0]}).json() == {"predictions": found[:1]}
    assert ask(model, b"\xef\xbb\xbf" + json.dumps({"text": texts[3]}).encode()).json() == {"predictions": [found[3]]}


def test_numbers(exports):
    texts = ["the film was great", "it was dull and grey"]
    found = [one["value"] for one in predictions(load_model(exports("regress")), texts)]
    assert found == pytest.approx([scores_by_hand(text, "regress").sum() for text in texts], abs=1e-5)


def test_words(exports):
    model = load_model(exports("tag"), length=6)
    words = ["a", "lovely", "film-ending"]  # the last one is three tokens, of which the first decides
    found, same, short, none = predictions(model, [words, " ".join(words), "so very very very slow", []])
    scores = scores_by_hand(words, "tag")[1:4]
    assert found["labels"] == [LABELS["tag"][number] for number in scores.argmax(1)] and found["words"] == words
    assert found["probabilities"] == pytest.approx(softmax(scores).max(1), abs=1e-5)
    assert same == found and none["labels"] == []
    assert found["cut"] and short["cut"]  # within the last word, and before it
    assert None not in found["labels"] and short["labels"][3] is not None and short["labels"][4] is None


def test_answers(exports):
    model = load_model(exports("answer"), length=16)
    context = draw_text(np.random.default_rng(1), 70)
    words, scores = context.split(), TABLE[make_tokenizer()(context, add_special_tokens=False)["input_ids"], :2]
    # Of 16 tokens three are special and three the question's; of the ten left, three are those of the window before.
    spans = [(a, b) for start in range(0, 70, 7) for a in range(start, 70) for b in range(a, min(start + 10, 70))]
    first, last = max(spans, key=lambda span: scores[span[0], 0] + scores[span[1], 1])
    wanted = " ".join(words[first : last + 1])
    found = ask(model, {"question": "what was it", "context": context}).json()["predictions"][0]
    assert found == {"answer": wanted, "cut": False}
    assert predictions(model, [["what was it", context]]) == [found]
    assert predictions(model, [{"question": "what was it " * 9, "context": context}])[0]["cut"]
    assert predictions(model, [["what", ""]])[0]["answer"] == ""
    crowded = ask(model, {"texts": [["what", context]] * 3}, Limits(texts=16))
    assert crowded.status_code == 413 and "windows" in crowded.json()["error"]


def test_unanswerable(exports):
    both = [load_model(exports("answer"), unanswerable=sure) for sure in (False, True)]
    draw = np.random.default_rng(0)
    asked = [["what", draw_text(draw, 2)] for _ in range(30)]
    always, maybe = (predictions(model, asked) for model in both)
    assert all(one["answer"] for one in always)
    nothing = [one["answer"] == "" for one in maybe]
    assert any(nothing) and not all(nothing)
    first = TABLE[2, :2].sum()  # of [CLS]
    best = [
        max(a[0] + b[1] for i, a in enumerate(t) for b in t[i:])
        for t in (scores_by_hand(c, "answer")[3:-1] for c in asked)
    ]
    assert nothing == [first > one for one in best]


def test_long_texts_are_cut_or_refused(exports):
    model = load_model(exports(), length=8)
    long, short = "the film was great " * 10, "the film was great"
    found = predictions(model, [long, short, [long, short]])
    assert [one["cut"] for one in found] == [True, False, True]
    wanted = TABLE[make_tokenizer()(long, truncation=True, max_length=8)["input_ids"], :2].sum(0)
    assert list(found[0]["probabilities"].values()) == pytest.approx(softmax(wanted), abs=1e-5)
    refused = ask(model, {"texts": [short, long]}, Limits(strict=True))
    assert refused.status_code == 422 and "text 1 is longer than the 8 tokens" in refused.json()["error"]
    assert ask(model, {"texts": [short]}, Limits(strict=True)).status_code == 200


def test_many_at_once_share_batches_and_keep_their_own(exports):
    draw = np.random.default_rng(0)
    texts = [draw_text(draw, draw.integers(1, 50)) for _ in range(90)]

    async def conversation(client):
        sent = [client.post("/predict", json={"texts": texts[start : start + 2]}) for start in range(0, 90, 2)]
        found = [one for answer in await asyncio.gather(*sent) for one in answer.json()["predictions"]]
        return found, read_metrics((await client.get("/metrics")).text)

    found, metrics = talk(load_model(exports()), conversation, Limits(batch=16, wait=0.05))
    for text, one in zip(texts, found, strict=True):
        assert list(one["probabilities"].values()) == pytest.approx(softmax(scores_by_hand(text).sum(0)), abs=1e-5)
    assert metrics["smallbert_batch_size_sum"] == 90 == metrics["smallbert_texts_total"]
    assert metrics["smallbert_batch_size_count"] <= 30
    assert metrics['smallbert_batch_size_bucket{le="16"}'] == metrics["smallbert_batch_size_count"]


BAD = {
    "not JSON": ("classify", b'{"text": ', 400, "not JSON"),
    "no body": ("classify", b"", 400, "not JSON"),
    "not UTF-8": ("classify", b'{"text": "\xff"}', 400, "not UTF-8 (byte 10)"),
    "nested": ("classify", b"[" * 200_000, 400, "nested too deeply"),
    "huge number": ("classify", b'{"text": ' + b"1" * 5000 + b"}", 400, "not JSON"),
    "a list": ("classify", ["good"], 422, "must be a JSON object"),
    "nothing": ("classify", {}, 422, 'nothing was given; give either "text" or "texts"'),
    "both": ("classify", {"text": "a", "texts": ["b"]}, 422, "'text', 'texts' was given"),
    "one name twice": ("classify", b'{"text": "a", "text": "b"}', 422, "'text' was given more than once"),
    "twice within": ("answer", b'{"texts": [{"question": "a", "context": "b", "context": "c"}]}', 422, "'context' was"),
    "another name": ("classify", {"inputs": "a"}, 422, "'inputs' was given"),
    "a strange name": ("classify", b'{"\\ud800": 1}', 422, "was given"),
    "empty": ("classify", {"texts": []}, 422, "is empty"),
    "no list": ("classify", {"texts": "good"}, 422, "must be a list"),
    "a number": ("classify", {"texts": ["good", 3]}, 422, "text 1 is not a string, or a pair"),
    "null": ("classify", {"text": None}, 422, "text 0 is not"),
    "three": ("classify", {"texts": [["a", "b", "c"]]}, 422, "text 0 is not"),
    "half a pair": ("classify", {"texts": [["a", 1]]}, 422, "text 0 is not"),
    "surrogate": ("classify", b'{"text": "\\ud800"}', 422, "lone surrogate"),
    "surrogate in a pair": ("classify", b'{"text": ["a", "\\udc00"]}', 422, "lone surrogate"),
    "too many": ("classify", {"texts": ["a"] * 65}, 413, "65 texts were given; at most 64"),
    "too big": ("classify", {"text": "a" * 1_000_000}, 413, "larger than 1,000,000 bytes"),
    "words": ("tag", {"texts": [["a", 1]]}, 422, "a list of words"),
    "no context": ("answer", {"text": "who?"}, 422, "question and context"),
    "half a question": ("answer", {"question": "who?"}, 422, 'or "question" and "context"'),
    "a wrong question": ("answer", {"question": 1, "context": "a"}, 422, "question and context"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name, exports):
    kind, body, status, sentence = BAD[name]
    answer = ask(load_model(exports(kind)), body)
    assert answer.status_code == status and answer.json().keys() == {"error"}
    assert sentence in answer.json()["error"] and "\n" not in answer.json()["error"]


@pytest.mark.parametrize("kind", ["classify", "regress"])
@pytest.mark.parametrize(
    ("pairs", "taken", "refused"),
    [
        (True, [["a film", ""], {"question": "a", "context": "b"}], "a film"),
        (False, ["a film", ""], ["a film", "dull"]),
    ],
)
def test_a_model_takes_what_it_was_trained_on_alone(kind, pairs, taken, refused, exports, tmp_path):
    shutil.copytree(exports(kind), tmp_path / "export")
    about = json.loads((tmp_path / "export" / "export.json").read_text())
    (tmp_path / "export" / "export.json").write_text(json.dumps({**about, "pairs": pairs}))
    model, unknown = load_model(tmp_path / "export"), load_model(exports(kind))
    assert predictions(model, taken) == predictions(unknown, taken) and predictions(unknown, [refused])
    answer = ask(model, {"texts": [taken[0], refused]})
    wants = "a pair of strings" if pairs else "a single string"
    assert answer.status_code == 422
    assert answer.json()["error"] == f"text 1 is not {wants}, as this model was trained on; nothing else is accepted"
    assert wants in talk(model, lambda client: client.get("/")).json()["predict"]


def test_words_are_no_pairs(exports, tmp_path):
    """A tagger has learned from texts alone, and reads lists of words all the same."""
    shutil.copytree(exports("tag"), tmp_path / "export")
    about = json.loads((tmp_path / "export" / "export.json").read_text())
    (tmp_path / "export" / "export.json").write_text(json.dumps({**about, "pairs": False}))
    assert predictions(load_model(tmp_path / "export"), [["a", "film"]])[0]["words"] == ["a", "film"]


def test_an_export_says_what_its_head_was_trained_on(tmp_path):
    """Also where an old head learned something new; what was never trained, or long ago, says nothing."""
    pytest.importorskip("onnxscript")

    def told(encoder):
        number = len(list(tmp_path.iterdir()))
        folders = tmp_path / f"model {number}", tmp_path / f"export {number}"
        save_folder(encoder, folders[0])
        return export_onnx(*folders)["pairs"]

    single, pair, short = toy_task("classify"), toy_task("pair"), "train(epochs=1)"
    new = run("head", small(), single).encoder
    assert told(new) is None
    learned = run(short, new, single).encoder
    assert told(learned) is False and "pairs" not in new.history[-1]
    assert told(run("quantize(8)", learned, single, judge=False).encoder) is False
    assert told(run(f"{short} | drop_layers(1)", learned, pair).encoder) is True
    rows = {name: replace(split, pairs=split.texts) for name, split in single.splits.items()}
    assert told(run(short, learned, replace(single, splits=rows)).encoder) is True
    assert learned_pairs(run("head", learned, replace(single, labels=("x", "y", "z"))).encoder) is None  # a new head
    corpus = str(Path(__file__).parent / "data" / "own" / "text.txt")
    recipe = f"pretrain({corpus!r}, steps=2, batch=2, length=16)"
    read = run(recipe, learned, replace(single, splits=rows), judge=False).encoder
    assert learned_pairs(read) is False  # no task was learned


ASKED = {
    "classify": ["the film was great", "dull", "", "Great! " * 90],
    "pair": [("the plot was flat", "the cast was not"), ["a", "b"]],
    "regress": ["the film was great", ""],
    "tag": ["the film was great", ["dull", "plot"]],
    "answer": [("what was great", " ".join(np.random.default_rng(0).choice(WORDS, 150))), ("who", "a cast")],
}


@pytest.mark.parametrize("kind", list(ASKED))
def test_python_says_what_the_server_says(kind, tmp_path):
    pytest.importorskip("onnxscript")
    encoder = run("train(epochs=1)", small(), toy_task(kind), judge=False).encoder
    save_folder(encoder, tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "export")
    wanted = predictions(load_model(tmp_path / "export"), ASKED[kind])
    for model in (encoder, load(tmp_path / "model")):
        for one, other in zip(predict(model, iter(ASKED[kind])), wanted, strict=True):
            assert flat(one) == pytest.approx(flat(other), abs=1e-4) and list(one) == list(other)
    if kind == "answer":
        named = dict(zip(("question", "context"), ASKED[kind][0], strict=True))
        assert predict(encoder, [named]) == predict(encoder, ASKED[kind][:1])
    assert predict(encoder, []) == [] and any(one["cut"] for one in wanted) == (kind == "classify")


def flat(found):
    """A prediction as one dictionary of numbers and words."""
    parts = {
        name: part if isinstance(part, dict) else dict(enumerate(np.atleast_1d(np.array(part, object))))
        for name, part in found.items()
    }
    return {f"{name} {key}": value for name, part in parts.items() for key, value in part.items()}


def test_what_python_cannot_be_asked():
    encoder = run("train(epochs=1)", small(), toy_task("classify"), judge=False).encoder
    assert predict(encoder, ["the film was great"], length=8)[0].keys() == {"label", "probabilities", "cut"}
    for texts, told in (
        ("a film", "as a list"),
        ([("a", "b")], "takes a single string"),
        ([3], "text 0 is 3; this model"),
    ):
        with pytest.raises(UserError, match=told):
            predict(encoder, texts)
    with pytest.raises(UserError, match="has no head, so it has nothing to predict"):
        predict(small(), ["a film"])
    with pytest.raises(UserError, match="at most 72"):
        predict(encoder, ["a film"], length=1000)
    for length in (-3, 0, 7):
        with pytest.raises(UserError, match=f"truncated to {length} tokens; give a length of 8 or more"):
            predict(encoder, ["a film"], length=length)
    with pytest.raises(UserError, match=r"text 1 is .*; this model takes a single string"):
        predict(encoder, ["a film", "half a \ud83d character"])


def test_unknown_routes_and_methods(exports):
    async def conversation(client):
        found = [
            await client.request(*one) for one in (("GET", "/nothing"), ("GET", "/predict"), ("DELETE", "/health"))
        ]
        found += [await client.get("/docs"), await client.post("/predict/", json={"text": "a"})]
        return found, await client.head("/health"), await client.get("/")

    found, health, about = talk(load_model(exports()), conversation)
    assert [one.status_code for one in found] == [404, 405, 405, 404, 404]
    assert found[1].json()["error"].startswith("there is no GET /predict; there is: GET /, ")
    assert found[1].headers["allow"] == "POST" and health.status_code == 200
    assert about.json()["labels"] == ["bad", "good"] and about.json()["length"] == 64


def test_a_body_is_measured_while_it_is_read(exports):
    taken = []

    async def chunks():  # without a Content-Length
        for _ in range(100):
            taken.append(1)
            yield b"a" * 100

    answer = talk(load_model(exports()), lambda client: client.post("/predict", content=chunks()), Limits(body=1000))
    assert answer.status_code == 413 and len(taken) < 20

    async def slow():
        yield b'{"text": '
        await asyncio.sleep(5)

    answer = talk(load_model(exports()), lambda client: client.post("/predict", content=slow()), Limits(seconds=0.1))
    assert answer.status_code == 408 and "did not arrive within 0.1 seconds" in answer.json()["error"]


class Slow(Model):
    """Takes its time, and breaks on one word."""

    def score(self, pieces):
        time.sleep(0.25)
        if any(6 in piece.ids for piece in pieces):  # "the"
            raise RuntimeError("the secret reason")
        return super().score(pieces)


def slow(folder) -> Slow:
    return Slow(**vars(load_model(folder)))


def test_too_many_are_turned_away(exports):
    async def conversation(client):
        sent = [client.post("/predict", json={"texts": ["film"] * 4}) for _ in range(10)]
        found = await asyncio.gather(*sent)
        return (
            found,
            await client.post("/predict", json={"text": "film"}),
            read_metrics((await client.get("/metrics")).text),
        )

    found, later, metrics = talk(slow(exports()), conversation, Limits(queue=12, texts=12))
    busy = [one for one in found if one.status_code == 503]
    assert [one.status_code for one in found].count(200) == 3 and len(busy) == 7
    assert busy[0].headers["retry-after"] == "1" and "try again" in busy[0].json()["error"]
    assert later.status_code == 200  # what was turned away takes no room
    assert metrics['smallbert_errors_total{status="503"}'] == 7


def test_bodies_that_are_still_read_take_no_room(exports):
    """Whoever is slow to send keeps nobody else out; what is kept of all bodies together has a limit of its own."""
    limits = Limits(queue=4, texts=4, bodies=130)

    async def conversation(client):
        sending, end = asyncio.Event(), asyncio.Event()

        async def body():
            yield b'{"text": "' + b" " * 5
            sending.set()
            await end.wait()
            yield b'film"}'

        late = [asyncio.create_task(client.post("/predict", content=body())) for _ in range(6)]
        await sending.wait()
        for _ in range(9):  # until all six are sending
            await asyncio.sleep(0)
        quick = await client.post("/predict", json={"texts": ["film"]})
        too_much = await client.post("/predict", json={"text": "film " * 10})
        end.set()
        return quick, too_much, await asyncio.gather(*late)

    quick, too_much, late = talk(load_model(exports()), conversation, limits)
    assert quick.status_code == 200 and too_much.status_code == 503
    assert sorted({one.status_code for one in late} - {503}) == [200]


def test_a_small_request_waits_for_no_large_one():
    """Five requests of 60 long texts, then one of two short ones: it is in the third batch."""
    batches, turns = [], threading.Semaphore(0)

    def score(pieces):
        batches.append([piece.ids[0] for piece in pieces])
        turns.acquire()
        return [np.zeros(2) for _ in pieces]

    async def go():
        batcher = Batcher(score, batch=32, wait=0.0, told=lambda size: None)
        batcher.put([Piece([7], [0])])
        while not batches:  # until it is in the model, so that all others wait
            await asyncio.sleep(0.001)
        large = [batcher.put([Piece([number] * 512, [0] * 512)] * 60) for number in range(5)]
        small = asyncio.gather(*batcher.put([Piece([9] * 8, [0] * 8)] * 2))
        waiting = batcher.waiting
        turns.release(4)
        await asyncio.wait_for(small, 10)
        turns.release(1000)
        await asyncio.gather(*(one for each in large for one in each))
        batcher.close(10)
        return waiting

    assert asyncio.run(go()) == 302
    assert batches[:4] == [[7], [0, 1, 2, 3], [4, 0, 1, 2], [9, 9]]  # of 512 tokens, 2,048 make a batch
    assert sum(map(len, batches)) == 303
    assert {*batches[-1]} | {*batches[-2]} == {0, 1, 2, 3, 4}  # equal requests end together


def test_what_takes_too_long_is_given_up(exports):
    async def conversation(client):
        first, *others = await asyncio.gather(*(client.post("/predict", json={"text": "film"}) for _ in range(4)))
        await asyncio.sleep(0.8)  # time enough for all four
        return [first, *others], await client.get("/metrics")

    found, metrics = talk(slow(exports()), conversation, Limits(batch=1, wait=0, seconds=0.4))
    assert [one.status_code for one in found] == [200, 504, 504, 504]
    assert "no answer within 0.4 seconds" in found[1].json()["error"]
    assert read_metrics(metrics.text)["smallbert_batch_size_count"] <= 2  # the others were not even begun


def test_one_that_gave_up_does_not_spoil_its_batch(exports):
    async def conversation(client):
        async def later():
            await asyncio.sleep(0.25)
            return await client.post("/predict", json={"text": "film"})

        return await asyncio.gather(client.post("/predict", json={"text": "a"}), later())

    found = talk(slow(exports()), conversation, Limits(batch=2, wait=1, seconds=0.4))  # both run from 0.25 to 0.5
    assert [one.status_code for one in found] == [504, 200]


def test_a_failure_tells_nothing_and_spoils_nobody_else(exports):
    async def conversation(client):
        return await asyncio.gather(*(client.post("/predict", json={"text": text}) for text in ("film", "the", "plot")))

    found = talk(slow(exports()), conversation, Limits(wait=0.1))
    assert [one.status_code for one in found] == [200, 500, 200]
    assert found[1].json()["error"].startswith("internal error") and "secret" not in found[1].text


def read_metrics(page: str) -> dict[str, float]:
    """Names with labels -> values; every line must be a comment or a sample of a family that was announced."""
    found, types = {}, {}
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert kind in ("counter", "gauge", "histogram") and name not in types
            types[name] = kind
        elif not line.startswith("# HELP "):
            match = re.fullmatch(r'([a-z_]+)(\{\w+="[^"]*"(,\w+="[^"]*")*\})? (\S+)', line)
            assert match and (match[1] in types or match[1].rpartition("_")[0] in types), line
            found[match[1] + (match[2] or "")] = float(match[4])
    return found


def test_metrics(exports):
    async def conversation(client):
        for body in ({"texts": ["film", "the plot " * 60]}, {"text": "a"}, {"texts": []}, {"texts": 3}):
            await client.post("/predict", json=body)
        await client.get("/somewhere")
        return (await client.get("/metrics")).text

    page = talk(load_model(exports()), conversation)
    found = read_metrics(page)
    assert found['smallbert_requests_total{path="/predict",status="200"}'] == 2
    assert found['smallbert_requests_total{path="other",status="404"}'] == 1
    assert found['smallbert_errors_total{status="422"}'] == 2 and found['smallbert_errors_total{status="404"}'] == 1
    assert found["smallbert_texts_total"] == 3 and found["smallbert_texts_cut_total"] == 1
    assert found["smallbert_queue_length"] == 0 and found["smallbert_ready"] == 1
    for name, count in {"batch_size": 2, "predict_seconds": 4}.items():
        buckets = [value for key, value in found.items() if key.startswith(f"smallbert_{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == found[f"smallbert_{name}_count"] == count


@contextmanager
def server(folder, *options, environment=None):
    """A real process, and its port."""
    command = [sys.executable, "-m", "smallbert", "serve", str(folder), "--port", "0", "--json", *map(str, options)]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **(environment or {})}, **given) as process:
        try:
            told = ""
            while not told.endswith("}\n") and (line := process.stdout.readline()):
                told += line
            assert told, process.stderr.read()
            yield process, int(json.loads(told)["url"].rpartition(":")[2])
        finally:
            process.kill()


def post(port: int, body, method: str = "POST", path: str = "/predict", **options):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = body if isinstance(body, bytes | type(None)) or hasattr(body, "__next__") else json.dumps(body)
    connection.request(method, path, body, **options)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.slow
def test_a_model_folder_is_exported_served_and_stopped(tmp_path):
    pytest.importorskip("onnxscript")
    task = toy_task("pair")
    encoder = run("head", small(), task).encoder
    save_folder(encoder, tmp_path / "model")
    (tmp_path / "aside").mkdir()
    rows = task.split("dev")
    texts = [list(pair) for pair in zip(rows.texts, rows.pairs, strict=True)]
    with torch.no_grad():
        wanted = encoder.eval()(batch_of(encoder, task, range(len(rows)))).softmax(-1)
    with server(tmp_path / "model", environment={"TMPDIR": str(tmp_path / "aside")}) as (process, port):
        status, found = post(port, {"texts": texts})
        given = torch.tensor([list(one["probabilities"].values()) for one in found["predictions"]])
        assert status == 200 and torch.allclose(given, wanted, atol=1e-5)
        assert post(port, None, "GET", "/health") == (200, {"status": "ready"})
        if Path("/proc/self/maps").exists():
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "libonnxruntime" in maps or "onnxruntime_pybind" in maps
            assert "libtorch" not in maps
        assert not list((tmp_path / "aside").glob("smallbert*"))  # so that not even a kill leaves anything
        process.terminate()
        assert process.wait(20) == 0
        told = process.stderr.read()
        assert "exporting model to ONNX" in told and "The model is in" not in told


def test_a_real_process(exports):
    """One server for all that needs a socket: limits, broken clients, a port in use, draining."""
    wait = 1500  # milliseconds that a lone text waits for company: long enough to be caught in flight
    with server(exports(), "--wait-ms", wait, "--batch", 8, "--max-body", 2000) as (process, port):
        assert post(port, b"a" * 3_000_000)[0] == 413
        assert post(port, iter([b"a" * 500] * 100))[0] == 413
        with socket.create_connection(("127.0.0.1", port)) as broken:
            broken.sendall(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        with socket.create_connection(("127.0.0.1", port)) as broken:
            broken.sendall(b"nonsense\r\n\r\n")
            answer = http.client.HTTPResponse(broken)
            answer.begin()
            assert answer.status == 400 and answer.headers["content-type"] == "application/json"
            assert "not a readable HTTP request" in json.loads(answer.read())["error"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            told = page.read().decode()
        assert 'requests_total{path="other",status="400"} 1\n' in told
        taken = subprocess.run(
            [sys.executable, "-m", "smallbert", "serve", str(exports()), "--port", str(port)],
            capture_output=True,
            text=True,
        )
        assert taken.returncode == 2 and taken.stdout == ""
        assert re.fullmatch(
            rf"error: cannot serve on 127.0.0.1:{port} \(.*in use\); give another --port.*\n", taken.stderr
        )

        flying = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        flying.request("POST", "/predict", json.dumps({"text": "the film was great"}))
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        with pytest.raises(ConnectionRefusedError):
            post(port, {"text": "too late"})
        answer = flying.getresponse()
        found = json.loads(answer.read())["predictions"][0]
        wanted = softmax(scores_by_hand("the film was great").sum(0))
        assert answer.status == 200 and list(found["probabilities"].values()) == pytest.approx(wanted, abs=1e-5)
        assert process.wait(10) == 0 and process.stderr.read() == ""


def test_what_outlasts_the_drain_is_told_to_try_again(exports):
    with server(exports(), "--wait-ms", 9000, "--drain", 1) as (process, port):
        flying = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        flying.request("POST", "/predict", json.dumps({"text": "film"}))
        slow = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        slow.putrequest("POST", "/predict")
        slow.putheader("Content-Length", "100")
        slow.endheaders(b"{")  # and no more
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        for answer in (flying.getresponse(), slow.getresponse()):
            assert answer.status == 503 and answer.headers["retry-after"] == "1"
            assert json.loads(answer.read()) == {"error": "this server is stopping; try again in a second"}
        assert process.wait(10) == 0 and "Traceback" not in process.stderr.read()


def test_sums_keep_all_digits():
    histogram = Histogram((1.0,))
    for value in (12_345_678, 0.25):
        histogram.add(value)
    assert "x_sum 12345678.25" in list(histogram.lines("x"))


def test_a_kill_leaves_nothing_behind(exports):
    before = sorted(exports().iterdir())
    with server(exports(), "--wait-ms", 5000) as (process, port):
        lost = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        lost.request("POST", "/predict", json.dumps({"text": "film"}))
        time.sleep(0.2)
        process.kill()
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            lost.getresponse()
    assert sorted(exports().iterdir()) == before
    with server(exports(), "--port", port) as (process, again):  # the same port is free at once
        assert again == port and post(port, {"text": "film"})[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def refused(capsys, *words) -> str:
    code = main(["serve", *map(str, words)])
    told = capsys.readouterr().err
    assert code == 2 and told.startswith("error: ") and told.count("\n") == 1
    return told


def test_what_cannot_be_served_is_said(exports, tmp_path, capsys, monkeypatch):
    assert "there is no model folder" in refused(capsys, tmp_path / "nowhere", "--port", 0)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(capsys, tmp_path / "empty", "--port", 0)
    save_folder(small(), tmp_path / "headless")
    with monkeypatch.context() as patch:
        patch.setattr("smallbert.serving.run.export_aside", None)  # nothing is exported for that
        assert "headless has no head, so" in refused(capsys, tmp_path / "headless", "--port", 0)
    assert "at most 64 tokens" in refused(capsys, exports(), "--port", 0, "--length", 65)
    assert "--queue 5" in refused(capsys, exports(), "--queue", 5)
    assert "--port or --host" in refused(capsys, exports(), "--host", "no.such.host.invalid")
    monkeypatch.setattr("smallbert.serving.run.find_spec", lambda name: None if name == "uvicorn" else 1)
    assert "serving needs uvicorn; run: pip install" in refused(capsys, exports())


def test_products_that_are_not_exact_are_said(tmp_path, capsys, monkeypatch):
    """The largest numbers tell it: a CPU without VNNI adds up pairs of them in 16 bits."""
    monkeypatch.setattr("onnxruntime.InferenceSession", Saturating)
    exactness.are_exact.cache_clear()
    assert not exactness.are_exact() and not exactness.is_exact("int8 products of 4- to 8-bit weights")
    assert exactness.is_exact("float32 products of 8-bit weights") and exactness.is_exact(None)
    monkeypatch.undo()
    for made, exact in (("float", True), ("whole", False)):
        folder = toy_export(tmp_path / made)
        if made == "whole":
            about = json.loads((folder / "export.json").read_text())
            (folder / "export.json").write_text(json.dumps(about | {"precision": "int8"}))
        asked = talk(load_model(folder), lambda client: client.get("/"))
        assert asked.json()["exact"] == exact
        monkeypatch.setattr("smallbert.serving.run.run_app", lambda app, bound, drain, when_ready: when_ready("URL"))
        assert main(["serve", str(folder), "--port", "0"]) == 0
        told = capsys.readouterr().out
        assert told == f"Serving {folder} (classify) on URL; stop it with Ctrl-C{'' if exact else f'. {INEXACT}'}\n"
    exactness.are_exact.cache_clear()


class Saturating:
    """Multiplies as CPUs without VNNI do."""

    def __init__(self, file, providers):
        assert file == exactness.PRODUCT

    def run(self, names, given):
        pairs = given["a"].astype(int).reshape(64, 128, 2), given["b"].astype(int).reshape(128, 2, 64)
        return [np.clip(np.einsum("mkp,kpn->mkn", *pairs), -(2**15), 2**15 - 1).sum(1).astype(np.int32)]


def test_the_file_that_asks_the_cpu():
    """It is what onnx writes, and runs with the onnxruntime of every day."""
    kinds = {"a": onnx.TensorProto.UINT8, "b": onnx.TensorProto.INT8, "y": onnx.TensorProto.INT32}
    values = [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    node = onnx.helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    graph = onnx.helper.make_graph([node], "g", values[:2], values[2:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 10)], ir_version=8)
    assert model.SerializeToString() == exactness.PRODUCT
    exactness.are_exact.cache_clear()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert exactness.are_exact() or "vnni" not in flags


def test_broken_exports_are_said(tmp_path):
    breaks = {
        "no head": {"export.json": {"kind": None}},
        "kind 'rank'": {"export.json": {"kind": "rank"}},
        "gives 2 scores where its export.json promises 3": {"export.json": {"labels": ["a", "b", "c"]}},
        "does not run": {"export.json": {"inputs": ["input_ids"]}},
        "has no tokenizer.json": {"tokenizer.json": None},
        "tokenizer.json cannot be loaded": {"tokenizer.json": "{}"},
        "model.onnx cannot be loaded": {"model.onnx": "nonsense"},
        "export.json cannot be read": {"export.json": "{"},
        "export.json holds a list": {"export.json": "[]"},
        'has an impossible value for "length"': {"export.json": {"length": "64"}},
        "does not say how long": {"export.json": {"length": None}, "tokenizer_config.json": "{}"},
    }
    for number, (sentence, changes) in enumerate(breaks.items()):
        folder = toy_export(tmp_path / str(number))
        for name, change in changes.items():
            if isinstance(change, dict):
                change = json.dumps(json.loads((folder / name).read_text()) | change)
            (folder / name).unlink() if change is None else (folder / name).write_text(change)
        with pytest.raises(UserError, match=re.escape(sentence)):
            load_model(folder)
        if "promises" in sentence or "not run" in sentence:  # what is timed is checked as what is served
            with pytest.raises(UserError, match=re.escape(sentence)):
                bench([read_variant(folder)], lengths=[8], seconds=0)
    with pytest.raises(UserError, match="too short to answer"):
        load_model(toy_export(tmp_path / "short", "answer"), length=10)


def test_serving_imports_no_torch():
    modules = "app batching kinds loading metrics model requests run".split()
    code = f"import sys, {', '.join(f'smallbert.serving.{one}' for one in modules)}; import smallbert.cli.serving;"
    code += "from smallbert.onnxfile.exactness import are_exact; are_exact();"
    code += (
        "print([name for name in ('torch', 'onnx', 'transformers', 'sklearn', 'matplotlib') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
