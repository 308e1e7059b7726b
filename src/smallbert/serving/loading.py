"""Reading an ONNX export folder; what is wrong with it is said at start, not at the first request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from smallbert.errors import UserError
from smallbert.serving.kinds import set_up
from smallbert.serving.model import Model, Piece

UNKNOWN = 10**6  # tokens; where no length is known, some huge number is written
NEEDED = ("model.onnx", "export.json", "tokenizer.json")


def load_model(folder: Path, threads: int = 1, length: int | None = None, unanswerable: bool = False) -> Model:
    """Read an export folder, and run it once, so that what is broken is found before anybody asks."""
    if lost := [name for name in NEEDED if not (folder / name).is_file()]:
        raise UserError(f"{folder} has no {lost[0]}; write it with: smallbert export MODEL --to onnx --out FOLDER")
    about, settings = _read_json(folder / "export.json"), _read_json(folder / "tokenizer_config.json")
    kind, labels = about.get("kind"), about.get("labels", [])
    if kind is None:
        raise UserError(f"{folder} has no head, so it has nothing to predict; train one first: smallbert finetune")
    most = min(about.get("length") or UNKNOWN, settings.get("model_max_length") or UNKNOWN)
    if most >= UNKNOWN:
        raise UserError(f"{folder} does not say how long its texts may be; export it again with this smallbert")
    if length is not None and length > most:
        raise UserError(f"--length was given {length}; this model can take at most {most} tokens")
    most = length or most
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --threads says how many threads work, here too
    cutting, whole = (_read_tokenizer(folder / "tokenizer.json") for _ in range(2))
    pad = settings.get("pad_token")
    pad = whole.token_to_id(pad["content"] if isinstance(pad, dict) else pad) if pad else 0
    session = _open_session(folder / "model.onnx", threads)
    names = about.get("inputs", [])
    model = Model(folder.resolve().name, kind, labels, most, names, pad or 0, cutting, whole, session, unanswerable)
    set_up(model, settings.get("truncation_side", "right"))
    _try_out(model, folder)
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
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class for each of its errors, and no common one
        raise UserError(f"{path} cannot be loaded: {_first_line(error)}; export the model again") from None


def _try_out(model: Model, folder: Path) -> None:
    token = model.whole.encode("a").ids[:1] or [0]
    try:
        scores = model.score([Piece(token, [0]), Piece(token * 2, [0, 0])])
    except Exception as error:
        raise UserError(f"{folder} does not run: {_first_line(error)}; export the model again") from None
    wanted = {"regress": 1, "answer": 2}.get(model.kind, len(model.labels))
    if scores[0].shape[-1] != wanted or not all(np.isfinite(one).all() for one in scores):
        found = f"{scores[0].shape[-1]} scores" if scores[0].shape[-1] != wanted else "scores that are no numbers"
        raise UserError(f"{folder} gives {found} where its export.json promises {wanted}; export the model again")


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises Exception itself
        raise UserError(f"{path} cannot be loaded: {_first_line(error)}; export the model again") from None
    found.no_truncation()
    found.no_padding()
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; export the model again") from None
    return found if isinstance(found, dict) else {}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
