"""What an encoder costs: bytes of its files, parameters, multiplications, and measured time; nothing is inferred."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from smallbert.data import usable_length
from smallbert.errors import UserError
from smallbert.model.anatomy import FAMILIES, anatomy, linears
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder
from smallbert.model.folders import probe_batch, read_tensors
from smallbert.model.zeros import sparse_linears

LEAST = 20  # timed rounds, however slow the model
WARM = 3
NOT_TIMED = "not timed, since other runs may have shared the machine"
PARTS = ("embeddings", "encoder", "head", "other")
NEEDED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "encoder.json",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)
_MULTIPLICATIONS = {  # what torch's own table lacks, in its unit: two operations a multiplication
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * q.numel() * k[-2],
    torch.ops.aten.mkldnn_rnn_layer: lambda x, w, u, *_, **__: 2 * x[0] * x[1] * (w.numel() + u.numel()),
    torch.ops.quantized.linear_dynamic: lambda inputs, *_, out_shape: 2 * out_shape.numel() * inputs[-1],
}


def measure(
    encoder: Encoder, folder: Path | str, length: int = 32, threads: int = 1, seconds: float | None = 2.0
) -> dict[str, Any]:
    """Every cost of an encoder saved in a folder, in the shapes of a card; without `seconds` to spend, untimed.

    {"bytes": …, "parameters": …, "macs": …, "latency": …, "throughput": None, "missing": {"throughput": "no GPU"}}
    """
    latency, throughput, missing = None, None, {}
    if seconds is None:
        missing = dict.fromkeys(("latency", "throughput"), NOT_TIMED)
    else:
        latency = measure_latency(encoder, length, threads=threads, seconds=seconds)
        try:
            throughput = measure_throughput(encoder, length, seconds=seconds)
            if throughput is None:
                missing["throughput"] = "no GPU on the machine that measured it"
        except torch.OutOfMemoryError:  # others may hold the GPU; all that can be known without it is worth having
            missing["throughput"] = "the GPU had not enough memory left"
    return {
        "bytes": measure_bytes(folder),
        "parameters": count_parameters(encoder),
        "macs": {"value": count_macs(encoder, length), "length": length},
        "latency": latency,
        "throughput": throughput,
        "missing": missing,
    }


def count_parameters(encoder: Encoder) -> dict[str, int]:
    """How many numbers it holds, shared ones once; "encoder" are the matrices of the layers, those that are pruned."""
    every = weights_of(encoder)
    table = f"backbone.{anatomy(encoder.backbone).words.split('.')[0]}."
    outside = [tensor for name, tensor in every.items() if not name.startswith(table)]
    modules = nn.ModuleList(module for _, module in linears(encoder.backbone))
    matrices = [tensor for tensor in weights_of(modules).values() if tensor.dim() > 1]
    return {
        "total": _count(every.values()),
        "non_embedding": _count(outside),
        "non_zero": _count_non_zero(every.values()),
        "encoder": _count(matrices),
        "encoder_non_zero": _count_non_zero(matrices),
    }


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored matrices by name, each tensor once; what only scales a matrix is not counted."""
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter) or (tensor.dim() > 1 and tensor.dtype != torch.bool):
            unique.setdefault(id(tensor), (name, tensor))
    unique |= {id(part): (f"{name}.weight", part.weight) for name, part in sparse_linears(module).items()}
    return dict(unique.values())


def _count(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _count_non_zero(tensors: Any) -> int:
    return sum(int(tensor.count_nonzero()) for tensor in tensors)


def measure_bytes(folder: Path | str) -> dict[str, int]:
    """The size on disk of the files that running the model needs; the parts add up to the weights.

    "encoder" is the backbone without its embeddings; file headers and a mixture of layers are "other".
    """
    folder = Path(folder)
    files = {path for pattern in NEEDED for path in folder.glob(pattern) if path.is_file()}
    weights = sorted(path for path in files if path.suffix == ".safetensors")
    if not weights:
        raise UserError(f"{folder} holds no weights; a model folder has a file model.safetensors")
    sizes: dict[str, int] = {}
    for path in weights:
        sizes |= _tensor_bytes(path)
    parts, part_of = dict.fromkeys(PARTS, 0), _sorter(folder, list(sizes))
    for name, size in sizes.items():
        parts[part_of(name)] += size
    whole = sum(path.stat().st_size for path in weights)
    parts["other"] += whole - sum(parts.values())
    return {"total": sum(path.stat().st_size for path in files), "weights": whole, **parts}


def _tensor_bytes(path: Path) -> dict[str, int]:
    """How many bytes each tensor of a safetensors file takes, from its header."""
    read_tensors(path, only_check=True)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: stop - start for name, (start, stop) in places.items()}


def _sorter(folder: Path, names: list[str]) -> Callable[[str], str]:
    """A function that tells which part of the model a stored name belongs to, in our layout or Hugging Face's."""
    row = FAMILIES[_family(folder)]
    # The word embedding shows under which prefix the backbone stands: "backbone.", "bert." or none.
    prefix = next((name.partition(row.words)[0] for name in names if f"{row.words}." in name), "backbone.")
    heads = ("heads", "pooler", f"{prefix}pooler", "head", "classifier", "qa_outputs", row.dense, row.classifier)
    starts = {
        "head": tuple(f"{head}." for head in heads),
        "embeddings": (f"{prefix}{row.words.split('.')[0]}.",),
        "encoder": (prefix,),
    }
    return lambda name: next((part for part, start in starts.items() if name.startswith(start)), "other")


def _family(folder: Path) -> str:
    for path in (folder / "encoder.json", folder / "config.json"):
        if path.is_file():
            about = json.loads(path.read_text(encoding="utf-8"))
            family = about.get("config", about).get("model_type")
            if family in FAMILIES:
                return family
    raise UserError(f"{folder} does not say which kind of model it holds; known are: {', '.join(FAMILIES)}")


def count_macs(encoder: Encoder, length: int, batch: int = 1) -> int:
    """Multiplications (each with its addition) of one forward over `batch` texts of `length` tokens, zeros included.

    BERT with L layers of width H and inner width F, T tokens:  L * (4 * T*H*H + 2 * T*H*F + 2 * T*T*H), and the head
    """
    # no_grad, not inference_mode: the counter follows modules by hooks that a parameter given as input breaks there.
    with _ready(encoder) as ready, torch.no_grad():
        with FlopCounterMode(display=False, custom_mapping=_MULTIPLICATIONS) as counter:
            ready(_texts(ready, length, batch))
    return counter.get_total_flops() // 2


def measure_latency(
    encoder: Encoder,
    length: int = 32,
    batch: int = 1,
    threads: int = 1,
    seconds: float = 2.0,
    repeats: int | None = None,
    warm: int = WARM,
) -> dict[str, Any]:
    """Measured time of one forward on the CPU: {"p50_ms": 7.9, "p95_ms": 8.3, "batch": 1, "length": 32, …}.

    It is run as often as `seconds` allow, 20 times at least; or `repeats` times, if given.
    """
    found = measure_latencies({"": encoder}, length, batch, threads, seconds, repeats, warm)[""]
    del found["ratio"]
    return found


def measure_latencies(
    encoders: Mapping[str, Encoder],
    length: int = 32,
    batch: int = 1,
    threads: int = 1,
    seconds: float = 2.0,
    repeats: int | None = None,
    warm: int = WARM,
) -> dict[str, dict[str, Any]]:
    """Latencies taken in turns, so that what disturbs one disturbs all; `seconds` is for each.

    "ratio" is the time against the first encoder's: the median of the ratios of each turn.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ExitStack() as stack:
            ready = {name: stack.enter_context(_ready(encoder)) for name, encoder in encoders.items()}
            calls = {name: partial(one, _texts(one, length, batch)) for name, one in ready.items()}
            with torch.inference_mode():  # only now: weights copied in it could not be used outside of it
                times = _take_turns(calls, seconds * len(calls), repeats, warm)
            sparse = {name: _sparse_products(one) for name, one in ready.items()}
    finally:
        torch.set_num_threads(threads_before)
    facts = {"batch": batch, "length": length, "threads": threads, "device": "cpu"}
    first = next(iter(times.values()))
    return {
        name: {
            "p50_ms": float(np.percentile(taken, 50)) * 1e3,
            "p95_ms": float(np.percentile(taken, 95)) * 1e3,
            **facts,
            "repeats": len(taken),
            "ratio": float(np.median(taken / first)),
            **sparse[name],
        }
        for name, taken in times.items()
    }


def _sparse_products(encoder: Encoder) -> dict[str, int]:
    """How many matrices are stored without zeros, and how many of them ran sparsely last, where there are any."""
    stored = sparse_linears(encoder).values()
    ran = sum(part.last_way == "sparse" for part in stored)
    return {"sparse_products": ran, "sparse_matrices": len(stored)} if stored else {}


def measure_throughput(
    encoder: Encoder, length: int = 32, batch: int = 256, seconds: float = 2.0, repeats: int | None = None
) -> dict[str, Any] | None:
    """Texts a second on the GPU, in bfloat16 and full batches; None where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    copy = encoder.copy().eval().to("cuda", torch.bfloat16)
    texts = _texts(copy, length, batch)

    def call() -> None:
        copy(texts)
        torch.cuda.synchronize()

    with torch.inference_mode():
        taken = _take_turns({"": call}, seconds, repeats, WARM)[""]
    facts = {"batch": batch, "length": length, "precision": "bfloat16", "device": torch.cuda.get_device_name()}
    return {"examples_per_second": batch / float(np.median(taken)), **facts, "repeats": len(taken)}


def _take_turns(
    calls: Mapping[str, Callable[[], object]], seconds: float, repeats: int | None, warm: int
) -> dict[str, np.ndarray]:
    """Call each in turn, again and again, and give the seconds that every single call took."""
    for _ in range(warm):
        for call in calls.values():
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    least, seconds = (LEAST, seconds) if repeats is None else (repeats, 0.0)
    begun, rounds = perf_counter(), 0
    while rounds < least or perf_counter() - begun < seconds:
        rounds += 1
        for name, call in calls.items():
            if len(calls) > 1:
                call()  # not timed: the one before has filled the caches with its own weights
            start = perf_counter()
            call()
            taken[name].append(perf_counter() - start)
    return {name: np.array(each) for name, each in taken.items()}


def _texts(encoder: Encoder, length: int, batch: int) -> Batch:
    """Random texts of one length: nothing is padding, so there is no mask."""
    usable_length(encoder, length)  # refuses what the model cannot take
    return replace(probe_batch(encoder, (length,) * batch), attention_mask=None).to(encoder.device)


@contextmanager
def _ready(encoder: Encoder) -> Iterator[Encoder]:
    """The encoder for reading on the CPU: itself, or a copy where it is elsewhere; left as it was."""
    training = encoder.training
    ready = encoder if encoder.device.type == "cpu" else encoder.copy().to("cpu")
    try:
        yield ready.eval()
    finally:
        encoder.train(training)
