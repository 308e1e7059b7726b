"""Handing a model over: as a plain Hugging Face folder, or as an ONNX file that was checked against the encoder."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from smallbert.errors import RunError, UserError
from smallbert.files import write_folder, write_json
from smallbert.model.anatomy import anatomy
from smallbert.model.batch import Batch
from smallbert.model.encoder import HEAD, Encoder
from smallbert.model.folders import load_folder, probe_batch, save_folder
from smallbert.model.zeros import with_plain_linears

# Lengths of the texts of each batch that is tried.
CHECKS: tuple[tuple[int, ...], ...] = (
    *((1,), (2,), (3, 2), (7,), (5, 9, 2), (8, 8), (11, 4, 6, 3), (16,)),
    *((13, 2), (17, 16, 15), (24,), (21, 5), (32, 31), (29,), (48, 2, 17), (64, 33, 20, 9)),
)
FAR = 1e-3  # two scores farther apart than this are not the same


def export_hugging_face(folder: Path | str, out: Path | str) -> dict[str, Any]:
    """Write what transformers needs and nothing else; a shape it does not know is refused."""
    encoder = with_plain_linears(load_folder(folder))
    with write_folder(_free(out)) as aside:
        inner = aside / "model"
        if save_folder(encoder, inner) != "huggingface":
            raise UserError(
                f"{folder} has no shape that transformers knows (a mixture of layers, 8-bit weights, another head), so "
                "it cannot be a plain Hugging Face folder; load it with smallbert, or write --to onnx"
            )
        for file in inner.iterdir():
            if file.name != "encoder.json":
                file.rename(aside / file.name)
        shutil.rmtree(inner)
    return {"folder": str(out), "files": sorted(file.name for file in Path(out).iterdir())}


def export_onnx(folder: Path | str, out: Path | str) -> dict[str, Any]:
    """Write model.onnx with free batch size and length, tokenizer and labels beside it.

    {"folder": "out", "bytes": 23019004, "checked": 16, "difference": 2.4e-07}

    Where onnxruntime is installed, its scores are compared with the encoder's, and a file that disagrees is not kept.
    """
    if find_spec("onnxscript") is None:
        raise UserError("writing ONNX needs onnx and onnxscript; run: pip install -e '.[onnx]'")
    encoder = with_plain_linears(load_folder(folder))
    if any(getattr(module, "activations", False) for module in encoder.modules()):
        raise UserError(
            f"{folder} rounds its inputs to 8 bits (activations=True) as torch's CPU kernels do, which ONNX cannot say "
            "in the same way; make it with quantize(8) alone to write it as ONNX"
        )
    with write_folder(_free(out)) as aside:
        _write_onnx(encoder, aside / "model.onnx")
        found = _check(encoder, aside / "model.onnx")
        if encoder.tokenizer is not None:
            encoder.tokenizer.save_pretrained(aside)
        about = {"inputs": list(_inputs(encoder)), "outputs": ["scores"], **found}
        head = encoder.head if HEAD in encoder.heads else None
        write_json(aside / "export.json", {**about, "labels": head.labels if head else [], "kind": head and head.kind})
    size = sum(file.stat().st_size for file in Path(out).glob("model.onnx*"))
    return {"folder": str(out), "bytes": size, **found}


class _Plain(nn.Module):
    """The encoder as a function of plain tensors."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Scores of padded texts."""
        size, longest = input_ids.shape
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        place = torch.arange(longest).expand(size, -1)
        return self.encoder(Batch(input_ids, types, place, attention_mask=attention_mask, size=size, longest=longest))


def _inputs(encoder: Encoder, lengths: tuple[int, ...] = (6, 9)) -> dict[str, Tensor]:
    """Random texts of these lengths, by the names of the inputs."""
    batch = probe_batch(encoder, lengths)
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    found = {"input_ids": batch.input_ids, "attention_mask": mask}
    return found | ({"token_type_ids": batch.token_type_ids} if anatomy(encoder.backbone).token_types else {})


def _write_onnx(encoder: Encoder, path: Path) -> None:
    from torch.export import Dim

    inputs = _inputs(encoder)
    free = {0: Dim("batch"), 1: Dim("length", min=1, max=_longest(encoder))}
    settings: dict[str, Any] = {"dynamo": True, "verbose": False, "output_names": ["scores"]}
    try:
        with _quietly():
            program = torch.onnx.export(
                _Plain(encoder.copy()).eval(),  # tracing leaves marks on what it walks through
                tuple(inputs.values()),
                input_names=list(inputs),
                dynamic_shapes={name: free for name in inputs},
                **settings,
            )
            program.save(path)  # type: ignore[union-attr]
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = next((line for line in str(error).splitlines()[::-1] if "Error" in line), str(error).splitlines()[0])
        raise RunError(f"torch could not write this {encoder.family} model as ONNX: {reason.strip()[:300]}") from error


def _longest(encoder: Encoder) -> int:
    from smallbert.data import usable_length

    wanted: Any = SimpleNamespace(length=10**6)  # a task that asks for as much as there is
    return usable_length(encoder, None, wanted)


def _check(encoder: Encoder, path: Path) -> dict[str, Any]:
    """The largest difference between the file's scores and the encoder's over varied texts."""
    if find_spec("onnxruntime") is None:
        return {"checked": 0, "difference": None}
    run, plain = _session(path), _Plain(encoder)
    lengths = [tuple(min(one, _longest(encoder)) for one in some) for some in CHECKS]
    worst = 0.0
    for some in lengths:
        inputs = _inputs(encoder, some)
        with torch.inference_mode():
            wanted = plain(**inputs)
        given = run({name: tensor.numpy() for name, tensor in inputs.items()})
        real = inputs["attention_mask"] > 0
        difference = (torch.from_numpy(given) - wanted).abs()
        worst = max(worst, float((difference if difference.dim() == 2 else difference[real]).max()))
    if not worst <= FAR:
        raise RunError(f"the ONNX file gives other scores than the encoder (by {worst:.2g}), so it was not kept")
    return {"checked": len(lengths), "difference": worst}


def _session(path: Path) -> Callable[[dict[str, Any]], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's own talk on stdout and in logs: what matters of it comes as an error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _free(out: Path | str) -> Path:
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already holds something else; give another --out, or move it away first")
    return out
