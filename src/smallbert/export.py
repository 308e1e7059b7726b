"""Handing a model over: as a plain Hugging Face folder, or as an ONNX file that was checked against the encoder."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from smallbert.errors import UserError
from smallbert.machine.files import write_folder, write_json, write_text
from smallbert.measuring.disk import export_bytes, measure_bytes
from smallbert.model.answering import learned_pairs
from smallbert.model.encoder import HEAD, PLAIN, Encoder, fingerprint
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.heads import Head
from smallbert.model.pooling import Pooler
from smallbert.model.quantised import StoredLinear, stored_parts, with_real_weights
from smallbert.model.words import WORDS
from smallbert.model.zeros import sparse_linears, with_plain_linears
from smallbert.progress import saying
from smallbert.texts.data import longest_input

if TYPE_CHECKING:
    from smallbert.model.batch import Batch
    from smallbert.onnxfile.check import Bound
    from smallbert.tasks import Task


def export_hugging_face(
    folder: Path | str,
    out: Path | str,
    task: Task | None = None,
    max_difference: float | None = None,
    say: Any = None,
) -> dict[str, Any]:
    """Write what transformers needs and nothing else; a shape it does not know is refused."""
    from smallbert.onnxfile.check import EXACT, compare, must_agree, open_hugging_face, varied_batches
    from smallbert.onnxfile.readme import make_plain_readme

    encoder = with_plain_linears(load_folder(folder))
    with write_folder(_free(out)) as aside:
        inner = aside / "model"
        if save_folder(encoder, inner) != "huggingface":
            raise UserError(
                f"{folder} has {_unknown_parts(encoder)}, which transformers does not support, so it cannot be a plain "
                "Hugging Face folder; load it with smallbert, or write --to onnx"
            )
        for file in inner.iterdir():
            if file.name != "encoder.json":
                file.rename(aside / file.name)
        shutil.rmtree(inner)
        found = compare(encoder, open_hugging_face(encoder, aside), varied_batches(encoder, task), say)
        must_agree(found, EXACT, max_difference)
        size = measure_bytes(aside)["total"]
        kind = encoder.head.kind if HEAD in encoder.heads else None
        about = {"bytes": size, "length": longest_input(encoder), **found}
        page = make_plain_readme(about, kind, Path(folder).resolve().name)
        write_text(aside / "README.md", page)
    files = sorted(file.name for file in Path(out).iterdir())
    return {"folder": str(out), "files": files, "bytes": size, "precision": "float32", **found, "notes": []}


def _unknown_parts(encoder: Encoder) -> str:
    """What of an encoder a plain Hugging Face folder has no place for."""
    head = encoder.head if HEAD in encoder.heads else None
    parts = {
        "weights in few bits": stored_parts(encoder),
        "an LSTM instead of layers": encoder.family == "bilstm",
        "a mixture of layers": encoder.mixture is not None,
        "connections between layers": encoder.connections is not None,
        "joined tokens": encoder.stride is not None,
        "a head that reads all layers": isinstance(head, Pooler),
        "a plain head beside it": PLAIN in encoder.heads,
        "a masked-LM head": WORDS in encoder.heads,
        "a head that reads the mean of all tokens": isinstance(head, Head)
        and head.pool == "mean"
        and encoder.family != "modernbert",
    }
    return " and ".join(name for name, has in parts.items() if has) or "an unusual shape"


def export_onnx(
    folder: Path | str,
    out: Path | str,
    task: Task | None = None,
    max_difference: float | None = None,
    say: Any = None,
) -> dict[str, Any]:
    """Write model.onnx with free batch size and length, tokenizer, labels and a README beside it.

    {"folder": "out", "bytes": 23019004, "checked": 97, "difference": 2.4e-07, "same": 1.0, "sway": 1e-08, …}

    What the model stores in few bits stays in few bits. Where onnxruntime is installed, its scores are compared with
    the encoder's on texts of the task and others, and a file that disagrees is not kept.
    """
    _check_installed()
    encoder = load_folder(folder)
    return _export(encoder, encoder, Path(folder).name, out, task, max_difference, say)


def export_int8(
    folder: Path | str,
    out: Path | str,
    task: Task | None = None,
    max_difference: float | None = None,
    say: Any = None,
    calibrate: Task | None = None,
) -> dict[str, Any]:
    """The same with 8-bit weights, a scale a row, and products of whole numbers.

    Inputs of layers are rounded by each token's own range; given a task to calibrate on, by ranges found on training
    texts.
    """
    _check_installed()
    encoder = load_folder(folder)
    if calibrate is not None and _learned_ranges(encoder):
        raise UserError(
            "this model has fixed ranges of its inputs already, so there are none to find; "
            "leave out --calibrate, or start from the model before it was quantised"
        )
    small = encoder if _is_int8(encoder) else make_int8(encoder, calibrate)
    if small is encoder and calibrate is not None:
        from smallbert.methods.quantize import TEXTS
        from smallbert.training.calibrate import draw_texts

        small = fix_ranges(encoder, draw_texts(encoder, calibrate, TEXTS, 0, "--calibrate"))
    return _export(encoder, small, Path(folder).name, out, task, max_difference, say, calibrate)


def make_int8(encoder: Encoder, calibrate: Task | None = None) -> Encoder:
    """A copy that stores 8-bit rows and rounds the inputs of its layers."""
    from smallbert.methods.quantize import Quantize

    ranges = _learned_ranges(encoder) if calibrate is None else {}
    method = Quantize(8, "static" if ranges else True)
    if calibrate is not None:
        method = Quantize(8, "static", smooth="search")
    plain = with_real_weights(with_plain_linears(encoder.copy()))
    plan, small = method.plan(plain, calibrate), plain.copy()
    if ranges:  # a head that is newer has none, and stays real
        tables = {name for name in plan["modules"] if isinstance(plain.get_submodule(name), nn.Embedding)}
        plan["modules"] = [name for name in plan["modules"] if name in ranges.keys() | tables]
        plan["scaled"] = [name for name, part in ranges.items() if part.input_factor is not None]
    small.apply_method(method, plan)
    if not ranges:
        method.fill(small, plain, plan, calibrate, 0)
        return small.eval()
    for name, part in ranges.items():
        learned = {key: value for key, value in part.state_dict().items() if key.startswith("input_")}
        small.get_submodule(name).load_state_dict(learned, strict=False)
    method.write(small, plain, plan["modules"])
    return small.eval()


def _learned_ranges(encoder: Encoder) -> dict[str, StoredLinear]:
    """The stored layers by name, if all of them round inputs by ranges of their own, found or learned before."""
    layers = {name: part for name, part in stored_parts(encoder).items() if isinstance(part, StoredLinear)}
    known = all(part.activations == "static" for part in layers.values()) and not sparse_linears(encoder)
    return layers if known else {}


def fix_ranges(encoder: Encoder, batches: list[Batch]) -> Encoder:
    """A copy whose layers round their inputs by ranges found on some texts, where each token had its own."""
    from smallbert.methods.quantize import set_ranges
    from smallbert.model.smoothing import whole_range
    from smallbert.training.calibrate import input_bounds

    small = encoder.copy().eval()
    parts = {name: part for name, part in stored_parts(small).items() if isinstance(part, StoredLinear)}
    parts = {name: part for name, part in parts.items() if part.activations is True}
    found = input_bounds(encoder, parts, batches)
    for part in parts.values():
        part.fix_range()
    factors = {name: 1.0 if part.input_factor is None else part.input_factor for name, part in parts.items()}
    set_ranges(small, {name: whole_range(bounds * factors[name]) for name, bounds in found.items()})
    return small


def _is_int8(encoder: Encoder) -> bool:
    """Whether its layers multiply whole numbers as they are."""
    found = [part for part in stored_parts(encoder).values() if isinstance(part, StoredLinear)]
    return bool(found) and all(part.activations and part.is_whole for part in found) and not sparse_linears(encoder)


def _export(
    encoder: Encoder,
    small: Encoder,
    title: str,
    out: Path | str,
    task: Task | None,
    limit: float | None,
    say: Any,
    calibrate: Task | None = None,
) -> dict[str, Any]:
    from smallbert.onnxfile.check import EXACT, OWN, ROUNDED
    from smallbert.onnxfile.readme import make_readme
    from smallbert.onnxfile.store import arithmetic
    from smallbert.onnxfile.trace import input_names

    say = say or (lambda *_: None)
    rounds = any(getattr(part, "activations", False) for part in stored_parts(small).values())
    bound = EXACT if not rounds else OWN if small is encoder else ROUNDED
    with write_folder(_free(out)) as aside, saying(say):
        say("tracing")
        notes = write_onnx(small, aside / "model.onnx")
        say("checking")
        found = _check(encoder, aside / "model.onnx", task, bound, limit, say)
        if encoder.tokenizer is not None:
            encoder.tokenizer.save_pretrained(aside)
        head = encoder.head if HEAD in encoder.heads else None
        about = {
            "inputs": input_names(encoder),
            "outputs": ["scores"],
            "length": longest_input(encoder),
            "pad": encoder.backbone.config.pad_token_id or 0,
            "labels": head.labels if head else [],
            "kind": head and head.kind,
            "pairs": learned_pairs(encoder),
            "model": fingerprint(encoder),
            "precision": arithmetic(small),
            "calibrated": calibrate and calibrate.fingerprint,
            **found,
            "notes": notes,
        }
        about = _describe(about, aside)
        write_text(aside / "README.md", make_readme(about, title))
    return {"folder": str(out), **about}


def _describe(about: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write export.json, which is one of the files whose bytes it gives: the third time it knows its own length."""
    for _ in range(3):
        about = about | {"bytes": export_bytes(folder)}
        write_json(folder / "export.json", about)
    return about


def write_onnx(encoder: Encoder, path: Path, first_only: bool = True) -> list[str]:
    """Write the file; gives what there is to say about it.

    Where a head reads the first token alone, the last layer computes that one alone, unless `first_only` is False.
    """
    import onnx

    from smallbert.onnxfile.narrow import avoid_slow_fusions, narrow
    from smallbert.onnxfile.store import bits_of, file_bits, keep_few_bits, tell_apart
    from smallbert.onnxfile.trace import trace

    notes = []
    if sparse_linears(encoder):
        notes.append("Zeros are stored too: ONNX has no sparse products.")
    encoder = with_plain_linears(encoder.copy())
    # A pooler that waits for a head is in no graph.
    parts = {name: part for name, part in stored_parts(encoder).items() if name.split(".")[0] != "pooler"}
    by_token = [part for part in parts.values() if getattr(part, "activations", False) is True]
    if not all(part.is_whole for part in by_token):
        notes.append("Inputs of layers are not rounded: no operator multiplies groups of weights in integers.")
    elif by_token:
        notes.append("Inputs are rounded token by token; ranges fixed with --calibrate TASK run about a tenth faster.")
    plain = with_real_weights(encoder.copy())
    known = tell_apart(plain, parts)
    model = trace(plain)
    if first_only:
        narrow(model)
    if parts:
        kept = keep_few_bits(model, known)
        more = any(file_bits(part) > bits_of(part) for part in parts.values())
        note = f"{kept} of {len(parts)} matrices are stored in few bits"
        notes.append(
            f"{note}; an ONNX file has types of 4 and 8 bits, and the next larger was taken." if more else f"{note}."
        )
    avoid_slow_fusions(model)
    onnx.save(model, str(path))
    return notes


def _check(
    encoder: Encoder, path: Path, task: Task | None, bound: Bound, limit: float | None, say: Any
) -> dict[str, Any]:
    if find_spec("onnxruntime") is None:
        return {"checked": 0, "difference": None, "same": None, "upheld": None, "sway": None}
    from smallbert.onnxfile.check import compare, must_agree, varied_batches

    found = compare(encoder, _session(path), varied_batches(encoder, task), say)
    must_agree(found, bound, limit)
    return found


def _session(path: Path) -> Any:
    from smallbert.onnxfile.check import open_session

    return open_session(path)


def _check_installed() -> None:
    if find_spec("onnxscript") is None:
        raise UserError("writing ONNX needs onnx and onnxscript; run: pip install -e '.[onnx]'")


def _free(out: Path | str) -> Path:
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already holds something else; give another --out, or move it away first")
    return out
