"""Whether an export says what the encoder says, on texts of many lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smallbert.errors import RunError
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder
from smallbert.model.folders import load_hugging_face, probe_batch, their_scores
from smallbert.onnxfile.sentences import varied_texts
from smallbert.onnxfile.trace import Plain, named_inputs
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, longest_input, tokenise, usable_length

if TYPE_CHECKING:
    from smallbert.tasks import Task

Run = Callable[[dict[str, np.ndarray]], np.ndarray]
# Lengths of the random texts of each batch that is tried, where there is no tokenizer.
LENGTHS: tuple[tuple[int, ...], ...] = (
    *((1,), (2,), (3, 2), (7,), (5, 9, 2), (8, 8), (11, 4, 6, 3), (16,)),
    *((13, 2), (17, 16, 15), (24,), (21, 5), (32, 31), (29,), (48, 2, 17), (64, 33, 20, 9)),
)
TEXTS = 64
PAIRED = 3  # every third text is a pair


class Bound(NamedTuple):
    """How far a file may be from its encoder: in scores, or in probabilities and by what share of predictions.

    same: are equal;  upheld: are equal, or were nearly tied in the encoder
    """

    far: float
    same: float = 0.0
    upheld: float = 0.0
    of_scores: bool = False


EXACT = Bound(1e-3, of_scores=True)
OWN = Bound(0.1, 0.95)  # both round inputs alike, and float noise moves some of them by a step
ROUNDED = Bound(0.5, 0.8, 0.95)  # the file alone rounds to 8 bits
TIED = 0.1  # between probabilities: what is nearer may go either way


def varied_batches(encoder: Encoder, task: Task | None = None, split: str = "dev") -> list[Batch]:
    """Padded batches of 64 real texts and more: sentences of many lengths, and before them those of a task."""
    most = longest_input(encoder)
    if encoder.tokenizer is None:
        return [probe_batch(encoder, tuple(min(one, most) for one in some)) for some in LENGTHS] * 2
    rows = varied_texts(TEXTS)
    seconds = [rows[place - 1] if place % PAIRED == 2 else None for place in range(len(rows))]
    encoded = [
        encoder.tokenizer(row, second, truncation=True, max_length=most, return_token_type_ids=True)
        for row, second in zip(rows, seconds, strict=True)
    ]
    own = [_pad(encoder, encoded[at : at + 1 + at % 5]) for at in _starts(len(rows))]
    if task is None:
        return own
    stream = tokenise(encoder.tokenizer, _few(task, split), task.kind, usable_length(encoder, None, task))
    many = min(len(stream.views[STUDENT]), 4 * TEXTS)
    asked = [make_batch(stream, np.arange(at, min(at + 1 + at % 5, many)), Layout(False, 0)) for at in _starts(many)]
    return asked + own


def _few(task: Task, split: str) -> Any:
    rows = task.split(split)
    return rows.take(range(min(len(rows), TEXTS)))


def _starts(count: int) -> Iterator[int]:
    at = 0
    while at < count:
        yield at
        at += 1 + at % 5


def _pad(encoder: Encoder, encoded: list[Any]) -> Batch:
    ids, types = ([one[name] for one in encoded] for name in ("input_ids", "token_type_ids"))
    longest, pad = max(map(len, ids)), encoder.backbone.config.pad_token_id or 0

    def lay(rows: list[list[int]], empty: int) -> Tensor:
        return torch.tensor([row + [empty] * (longest - len(row)) for row in rows])

    mask = lay([[1] * len(row) for row in ids], 0)
    place = torch.arange(longest).expand(len(ids), -1)
    return Batch(lay(ids, pad), lay(types, 0), place, attention_mask=mask, size=len(ids), longest=longest)


def compare(encoder: Encoder, run: Run, batches: list[Batch], say: Any = None) -> dict[str, Any]:
    """How far a file's scores are from the encoder's.

    {"checked": 97, "difference": 0.21, "same": 0.99, "upheld": 1.0, "sway": 0.04}

    "same" is the share of equal predictions, "upheld" that of those which are equal or were nearly tied, "sway" the
    largest change of a probability; of numbers it is the largest difference in units of their own spread, of hidden
    states the largest 1 - cosine.
    """
    plain, kind = Plain(encoder.eval()), encoder.head.kind if encoder.heads else None
    ours, theirs, worst, checked = [], [], 0.0, 0
    for number, batch in enumerate(batches):
        inputs = named_inputs(encoder, batch)
        with torch.inference_mode():
            wanted = plain(**inputs)
        given = torch.from_numpy(run({name: tensor.numpy() for name, tensor in inputs.items()}))
        if given.shape != wanted.shape:
            raise RunError(f"the export gives scores of shape {tuple(given.shape)}, the encoder {tuple(wanted.shape)}")
        real = inputs["attention_mask"] > 0
        seen = [scores if scores.dim() == 2 else scores[real] for scores in (wanted, given)]
        for scores, whose in zip(seen, ("the model", "the export"), strict=True):
            if not scores.isfinite().all():
                raise RunError(f"{whose} gives scores that are not finite (NaN or infinite), so no file was kept")
        worst = max(worst, float((seen[0] - seen[1]).abs().max()))
        ours += _opinions(wanted, real, kind)
        theirs += _opinions(given, real, kind)
        checked += len(wanted)
        if say is not None:
            say("checking", number + 1, len(batches))
    found: dict[str, Any] = {"checked": checked, "difference": worst}
    if kind is None:
        return {**found, "same": None, "upheld": None, "sway": 1 - min(map(_least_cosine, ours, theirs))}
    sway = max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))
    if kind == "regress":
        spread = float(torch.cat([one.flatten() for one in ours]).std())
        return {**found, "same": None, "upheld": None, "sway": sway / max(spread, 1e-9)}
    # By how much the encoder itself prefers another prediction to that of the file.
    behind = torch.cat([_preference(one, other) for one, other in zip(ours, theirs, strict=True)])
    shares = {name: float((behind <= most).float().mean()) for name, most in (("same", 0.0), ("upheld", TIED))}
    return {**found, **shares, "sway": sway}


def _preference(ours: Tensor, theirs: Tensor) -> Tensor:
    return ours.amax(-1) - ours.gather(-1, theirs.argmax(-1, keepdim=True)).squeeze(-1)


def _opinions(scores: Tensor, real: Tensor, kind: str | None) -> list[Tensor]:
    """Probabilities of classes, of tags, or of places where an answer starts and ends; else the scores themselves."""
    if kind == "classify":
        return [scores.softmax(-1)]
    if kind == "tag":
        return [scores[real].softmax(-1)]
    if kind == "answer":
        return [row[keep].T.softmax(-1) for row, keep in zip(scores, real, strict=True)]
    return [scores if scores.dim() == 2 else scores[real]]


def _least_cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.cosine_similarity(one, other, dim=-1).min())


def must_agree(found: dict[str, Any], bound: Bound, asked: float | None) -> None:
    """Refuse a file that says something else than the encoder."""
    far, limit = found["difference" if bound.of_scores else "sway"], asked or bound.far
    if not far <= limit:
        what = "probabilities (or vectors)" if found["same"] is None else "probabilities"
        raise RunError(
            f"the export gives other {'scores' if bound.of_scores else what} than the encoder (by {far:.2g}, where "
            f"{limit:g} is allowed), so it was not kept; `smallbert export` has --max-difference to allow more"
        )
    if found["same"] is None or (asked is not None and asked >= bound.far):  # who allows less still wants the shares
        return
    for share, least, more in (
        (found["same"], bound.same, ""),
        (found["upheld"], bound.upheld, " or were nearly tied"),
    ):
        if share < least:
            raise RunError(
                f"of the predictions of the export only {share:.0%} are the encoder's{more}, so it was not kept; try "
                "`smallbert export` with --calibrate and the task, or with --max-difference 0.5 to keep it anyway"
            )


def open_hugging_face(encoder: Encoder, folder: Path) -> Run:
    """The same of a plain Hugging Face folder, by transformers' own forward."""
    model = load_hugging_face(encoder, folder).eval()

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            return their_scores(encoder, model(**{name: torch.from_numpy(one) for name, one in inputs.items()})).numpy()

    return run


def open_session(path: Path | str, threads: int | None = None) -> Run:
    """A function from inputs by name to scores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting must cost others nothing
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]
