"""What an encoder costs: bytes of its files, parameters, multiplications, and measured time; nothing is inferred."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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

from smallbert.measuring.disk import measure_bytes
from smallbert.model.anatomy import anatomy, layers, linears
from smallbert.model.batch import Batch
from smallbert.model.cpu import PRODUCT
from smallbert.model.encoder import HEAD, Encoder
from smallbert.model.folders import probe_batch
from smallbert.model.products import are_exact
from smallbert.model.quantised import packed_parts, stored_parts
from smallbert.model.zeros import sparse_linears
from smallbert.texts.data import usable_length

LEAST = 20  # timed rounds, however slow the model
WARM = 3
NOT_TIMED = "not timed, since other runs may have shared the machine"


def _product(inputs: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
    return 2 * out_shape.numel() * inputs[-1]


_MULTIPLICATIONS = {  # what torch's own table lacks, in its unit: two operations a multiplication
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * q.numel() * k[-2],
    torch.ops.aten.mkldnn_rnn_layer: lambda x, w, u, *_, **__: 2 * x[0] * x[1] * (w.numel() + u.numel()),
    torch.ops.aten._int_mm: _product,
    **({} if PRODUCT is None else {PRODUCT: _product}),
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
            missing["throughput"] = "the GPU did not have enough free memory"
    return {
        "bytes": measure_bytes(folder),
        "parameters": count_parameters(encoder),
        "macs": {"value": count_macs(encoder, length), "length": length},
        "latency": latency,
        "throughput": throughput,
        "missing": missing,
    }


def count_parameters(encoder: Encoder) -> dict[str, int]:
    """How many numbers it holds, shared ones once; "encoder" are the matrices of the layers, those that are pruned.

    "head" is the head that predicts, "running" all that one prediction runs: not a second head, nor layers above the
    last one that a pooler reads.
    """
    every = weights_of(encoder)
    table = f"backbone.{anatomy(encoder.backbone).words.split('.')[0]}."
    outside = [tensor for name, tensor in every.items() if not name.startswith(table)]
    modules = nn.ModuleList(module for _, module in linears(encoder.backbone))
    matrices = {name: tensor for name, tensor in weights_of(modules).items() if tensor.dim() > 1}
    # Without pruning, a number that was rounded to zero is a number like any other.
    pruned = any("zeros" in entry.get("held", {}) for entry in encoder.history)
    rounded = [{} if pruned else stored_parts(one) for one in (encoder, modules)]
    return {
        "total": _count(every.values()),
        "non_embedding": _count(outside),
        "non_zero": _count_non_zero(every, rounded[0]),
        "encoder": _count(matrices.values()),
        "encoder_non_zero": _count_non_zero(matrices, rounded[1]),
        "head": _count(weights_of(encoder.head).values()) if HEAD in encoder.heads else 0,
        "running": _count(every.values()) - _count(weights_of(_idle(encoder)).values()),
    }


def _idle(encoder: Encoder) -> nn.ModuleList:
    """The parts that no prediction runs."""
    others = [head for name, head in encoder.heads.items() if name != HEAD]
    reads = getattr(encoder.head, "reads", None) if HEAD in encoder.heads else None
    run = set(encoder.order if reads is None else encoder.order[: reads[-1]])
    return nn.ModuleList(others + [layer for number, layer in enumerate(layers(encoder.backbone)) if number not in run])


def size_in_words(encoder: Encoder) -> str:
    """An encoder in a few words: "12 layers 768 wide and 109,483,778 parameters"."""
    return f"{len(encoder.order)} layers {encoder.width} wide and {_count(weights_of(encoder).values()):,} parameters"


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored matrices by name, each tensor once; what only scales a matrix is not counted."""
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter) or (tensor.dim() > 1 and tensor.dtype != torch.bool):
            unique.setdefault(id(tensor), (name, tensor))
    unique |= {id(part): (f"{name}.weight", part.weight) for name, part in sparse_linears(module).items()}
    unique |= {id(part): (f"{name}.weight", part.real()) for name, part in packed_parts(module).items()}
    return dict(unique.values())


def _count(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _count_non_zero(tensors: dict[str, Tensor], rounded: Collection[str]) -> int:
    whole = {f"{name}.weight" for name in rounded}
    return sum(one.numel() if name in whole else int(one.count_nonzero()) for name, one in tensors.items())


def count_macs(encoder: Encoder, length: int, batch: int = 1) -> int:
    """Multiplications (each with its addition) of one forward over `batch` texts of `length` tokens, zeros included.

    BERT with L layers of width H and inner width F, T tokens:  L * (4 * T*H*H + 2 * T*H*F + 2 * T*T*H), and the head
    """
    are_exact()  # asked once by products of its own, which are not to be counted
    # The counter follows modules by hooks on what they are given, which break on inference tensors, and on parts of
    # parameters that could have a gradient but have none: so nothing may want one meanwhile.
    with _ready(encoder) as ready, _no_gradients(ready), torch.no_grad():
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
    found = measure_latencies({"": encoder}, length, batch, threads, seconds, repeats=repeats, warm=warm)[""]
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
                times = take_turns(calls, seconds * len(calls), repeats, warm)
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
        taken = take_turns({"": call}, seconds, repeats, WARM)[""]
    facts = {"batch": batch, "length": length, "precision": "bfloat16", "device": torch.cuda.get_device_name()}
    return {"examples_per_second": batch / float(np.median(taken)), **facts, "repeats": len(taken)}


def take_turns(
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
def _no_gradients(encoder: Encoder) -> Iterator[None]:
    """No parameter wants a gradient for a while."""
    learned = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


@contextmanager
def _ready(encoder: Encoder) -> Iterator[Encoder]:
    """The encoder for reading on the CPU: itself, or a copy where it is elsewhere; left as it was."""
    training = encoder.training
    ready = encoder if encoder.device.type == "cpu" else encoder.copy().to("cpu")
    try:
        yield ready.eval()
    finally:
        encoder.train(training)
