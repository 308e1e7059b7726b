"""Reading an ONNX export folder; what is wrong with it is said at start, not at the first request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from smallbert.errors import UserError
from smallbert.onnxfile.exactness import is_exact
from smallbert.onnxfile.exported import FILE, Exported, check_scores, read_exported, read_object, told_of
from smallbert.serving.kinds import set_up
from smallbert.serving.model import Model, Piece

UNKNOWN = 10**6  # tokens; where no length is known, some huge number is written
NEEDED = ("model.onnx", FILE, "tokenizer.json")

NO_HEAD = "has no head, so it has nothing to predict; train one first: smallbert finetune"


def load_model(folder: Path, threads: int = 1, length: int | None = None, unanswerable: bool = False) -> Model:
    """Read an export folder, and run it once, so that what is broken is found before anybody asks."""
    if lost := [name for name in NEEDED if not (folder / name).is_file()]:
        raise UserError(f"{folder} has no {lost[0]}; write it with: smallbert export MODEL --to onnx --out FOLDER")
    about, settings = read_exported(folder), read_object(folder / "tokenizer_config.json")
    if about.kind is None:
        raise UserError(f"{folder} {NO_HEAD}")
    most = min(about.length or UNKNOWN, settings.get("model_max_length") or UNKNOWN)
    if most >= UNKNOWN:
        raise UserError(f"{folder} does not say how long texts may be; export it again with this version")
    if length is not None and length > most:
        raise UserError(f"--length was given {length}; this model can take at most {most} tokens")
    most = length or most
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --threads says how many threads work, here too
    cutting, whole = (_read_tokenizer(folder / "tokenizer.json") for _ in range(2))
    pad = settings.get("pad_token")
    pad = whole.token_to_id(pad["content"] if isinstance(pad, dict) else pad) if pad else 0
    session = _open_session(folder / "model.onnx", threads)
    facts = (folder.resolve().name, about.kind, about.labels, most, about.inputs)
    model = Model(*facts, pad or 0, cutting, whole, session, unanswerable, about.pairs, is_exact(about.precision))
    set_up(model, settings.get("truncation_side", "right"))
    _try_out(model, folder, about)
    return model


def _open_session(path: Path, threads: int) -> Any:
    import onnxruntime

    onnxruntime.disable_telemetry_events()  # a server tells nobody what it does
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_mem_pattern = False  # it would remember a plan for every shape ever seen
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # a waiting thread must not burn a core
    options.log_severity_level = 4
    with told_of(path, "cannot be loaded"):
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _try_out(model: Model, folder: Path, about: Exported) -> None:
    token = model.whole.encode("a").ids[:1] or [0]
    with told_of(folder, "does not run"):
        scores = model.score([Piece(token, [0]), Piece(token * 2, [0, 0])])
    check_scores(folder, about, scores)


def _read_tokenizer(path: Path) -> Tokenizer:
    with told_of(path, "cannot be loaded"):
        found = Tokenizer.from_file(str(path))
    found.no_truncation()
    found.no_padding()
    return found
