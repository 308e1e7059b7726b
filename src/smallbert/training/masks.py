"""Masks over weight matrices, kept by score: the one parametrisation that every unstructured pruning method shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.model.anatomy import anatomy, linears, words
from smallbert.model.encoder import HEAD, Encoder
from smallbert.model.zeros import sparse_linears
from smallbert.training.phase import Phase, Weights
from smallbert.training.ranking import LOWEST, Cuts, keep_top

MASK_STAGE = 30
FEW = 20  # steps in which nothing much is learned
What = Literal["layers", "layers+pooler", "layers+embeddings", "layers+pooler+embeddings"]
Score = Callable[[list[str], Weights], Tensor]  # the scores of a group of like-sized matrices, one matrix a row


def maskable(encoder: Encoder, what: What = "layers") -> list[str]:
    """The weights that pruning may touch: the matrices of the layers; never biases, norms or the last layer of a head.

    "pooler" adds the pretrained dense layer above the last one, where the model has one, "embeddings" those of words.
    """
    parts = [(f"backbone.{name}", module) for name, module in linears(encoder.backbone) if _is_plain(module)]
    if not parts:
        return []  # what else there is would be pruned where nobody looks for it
    if "pooler" in what:
        parts += _pooler(encoder)
    if "embeddings" in what:
        parts.append((f"backbone.{anatomy(encoder.backbone).words}", words(encoder.backbone)))
    return [f"{name}.weight" for name, module in parts if _is_plain(module)]


def _pooler(encoder: Encoder) -> list[tuple[str, nn.Module]]:
    """The pooler, also where a head has taken it over; a dense layer that a head drew anew is none."""
    if HEAD not in encoder.heads:
        return [] if encoder.pooler is None else [("pooler", encoder.pooler)]
    taken = [entry["plan"]["from_pooler"] for entry in encoder.history if "from_pooler" in entry["plan"]]
    return [(f"heads.{HEAD}.dense", encoder.head.dense)] if taken[-1:] == [True] and encoder.head.dense else []


def _is_plain(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), nn.Parameter)


class _Masked(torch.autograd.Function):
    """weight * (score >= threshold) for a stack of matrices, each one pass over memory each way on a GPU.

    The straight-through gradient of the scores is weight * G, G the gradient of the masked weight. All scores of a
    stack are one tensor, and their gradients are written side by side, never gathered.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, thresholds: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(scores, thresholds, *weights)
        if scores.is_cuda:
            from smallbert.training.kernels import mask_stack

            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weights[0].dtype
            made = mask_stack([weight.detach() for weight in weights], scores, thresholds, dtype)
            return tuple(row.view_as(weight) for row, weight in zip(made, weights, strict=True))
        rows = [row.view_as(weight) for row, weight in zip(scores, weights, strict=True)]
        return tuple(w * (row >= cut) for w, row, cut in zip(weights, rows, thresholds, strict=True))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        scores, thresholds, *weights = ctx.saved_tensors
        scored = ctx.needs_input_grad[0]
        if scores.is_cuda:
            from smallbert.training.kernels import spread_stack

            rows, to_scores = spread_stack([one.contiguous() for one in slopes], weights, scores, thresholds, scored)
            to_weights = [row.view_as(weight) for row, weight in zip(rows, weights, strict=True)]
        else:
            both = list(zip(slopes, weights, scores, thresholds, strict=True))
            to_weights = [slope * (row.view_as(weight) >= cut) for slope, weight, row, cut in both]
            to_scores = torch.stack([(slope * weight).flatten() for slope, weight, _, _ in both]) if scored else None
        wanted = zip(to_weights, ctx.needs_input_grad[2:], strict=True)  # frozen weights want none
        return to_scores, None, *(slope if needed else None for slope, needed in wanted)


class Stacks:
    """Matrices of like size side by side, so that all their thresholds are found at once.

    24 matrices of 3072 x 768 and 48 of 768 x 768  ->  two groups of names
    """

    def __init__(self, encoder: Encoder, names: list[str]):
        """Group weights by how many numbers they hold."""
        stored = dict(encoder.named_parameters())
        self.shapes = {name: stored[name].shape for name in names}
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(stored[name].numel(), []).append(name)
        self.groups = list(groups.values())

    def rows(self, stacks: list[Tensor]) -> Weights:
        """What lies in stacks (matrices, numbers), by the name and in the shape of each matrix; views, not copies."""
        pairs = [
            pair for group, stack in zip(self.groups, stacks, strict=True) for pair in zip(group, stack, strict=True)
        ]
        return {name: row.view(self.shapes[name]) for name, row in pairs}

    def filled(self, value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Stacks that hold one value everywhere."""
        sizes = [(len(group), self.shapes[group[0]].numel()) for group in self.groups]
        return [torch.full(size, value, device=device, dtype=dtype) for size in sizes]


def mask_by_scores(phase: Phase, names: list[str], score: Score, cuts: Cuts) -> None:
    """Let the model see only the weights whose scores reach where `cuts` cuts."""
    stacks = stack_up(phase.encoder, names)

    def make(weights: Weights) -> Weights:
        scores = [score(group, weights) for group in stacks.groups]
        with torch.no_grad():
            found = cuts([stack.detach() for stack in scores])
        masked: Weights = {}
        for group, stack, cut in zip(stacks.groups, scores, found, strict=True):
            seen = _Masked.apply(stack, cut.contiguous(), *(weights[name] for name in group))
            masked.update(zip(group, seen, strict=True))
        return masked

    phase.transform(names, make, MASK_STAGE)


def stack_up(encoder: Encoder, names: list[str]) -> Stacks:
    """The stacks of these weights; where there are none, a sentence that says so."""
    if not names and sparse_linears(encoder):
        raise UserError(
            f"there is no weight to prune: the matrices of this {encoder.family} model are stored without their zeros, "
            "and are not trained; prune before sparse, as in magnitude(0.1) + train | sparse"
        )
    if not names:
        raise UserError(
            f"there is no weight to prune: the layers of this {encoder.family} model hold no real-valued matrix "
            "that pruning supports; prune before quantize, or choose a family that has such matrices"
        )
    return Stacks(encoder, names)


def train_scores(phase: Phase, label: str, names: list[str], start: float | list[Tensor], lr: float) -> Score:
    """One trained score a weight, under a label and with a learning rate of its own, and how to look them up."""
    stacks = stack_up(phase.encoder, names)
    first = stacks.filled(start, phase.device) if isinstance(start, float) else start
    sink_held_zeros(phase, stacks, first)
    scores = nn.ParameterList(first)
    phase.train_module(label, scores, lr=lr)
    number = {group[0]: place for place, group in enumerate(stacks.groups)}
    return lambda group, weights: scores[number[group[0]]]


def sink_held_zeros(phase: Phase, stacks: Stacks, scores: list[Tensor]) -> None:
    """Give the lowest score to the zeros that earlier phases settled on; no gradient reaches them, so it stays."""
    alive = phase.held_masks()
    for name, row in stacks.rows(scores).items():
        if name in alive:
            row.masked_fill_(~alive[name], LOWEST)


def carry_stacks(phase: Phase, label: str, stacks: dict[str, list[Tensor]]) -> None:
    """Carry tensors from step to step: not trained, but saved in checkpoints; see `carried`."""
    lists = {key: nn.ParameterList(nn.Parameter(one, False) for one in some) for key, some in stacks.items()}
    phase.train_module(label, nn.ModuleDict(lists))


def carried(phase: Phase, label: str, key: str) -> list[Tensor]:
    """The tensors that `carry_stacks` was given, as they are now; writing into them is what a method is to do."""
    return [one.data for one in phase.modules[label][key]]  # type: ignore[index]


def mean_of_means(phase: Phase, label: str, value: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over matrices of the mean of a function of their scores: a small one counts as much as a large."""
    scores: Any = phase.modules[label]
    return torch.cat([value(stack).mean(1) for stack in scores]).mean()


def magnitudes(names: list[str], weights: Weights) -> Tensor:
    """The size of every weight, one matrix a row."""
    return torch.stack([weights[name].detach().abs().flatten() for name in names])


def prune_once(
    encoder: Encoder, names: list[str], keep: float, scope: str, by: str = "magnitude", seed: int = 0
) -> None:
    """Write zeros over all but the share `keep`: the largest stay, or some drawn at random of those not zero yet."""
    stacks, stored = stack_up(encoder, names), dict(encoder.named_parameters())
    sizes = [magnitudes(group, stored) for group in stacks.groups]  # type: ignore[arg-type]
    if by == "random":
        draw = torch.Generator().manual_seed(seed)
        sizes = [(1 - torch.rand(one.shape, generator=draw).to(one.device)) * (one != 0) for one in sizes]
    with torch.no_grad():
        for name, mask in stacks.rows(keep_top(sizes, keep, scope)).items():
            stored[name].mul_(mask)


def check_trained(phase: Phase, label: str, what: What) -> None:
    """Refuse a model without weights to prune, and a frozen part, for a method that prunes by how they are trained."""
    stack_up(phase.encoder, maskable(phase.encoder, what))
    frozen = phase.settings.freeze
    if frozen == "backbone" or (frozen == "embeddings" and "embeddings" in what):
        raise UserError(
            f"{label} prunes weights by how they are trained, but train(freeze={frozen!r}) does not train some of "
            "them; do not freeze them, or use movement, which can train masks alone"
        )


def settle_masks(phase: Phase, what: What) -> None:
    """Hold the zeros that are now in the weights, and say how many weights are left and whether that was trained."""
    names, keep = maskable(phase.encoder, what), phase.schedules.get("keep")
    hold_zeros(phase.encoder, names)
    share = note_density(phase, names, what, None if keep is None else keep.end)
    if keep is None and share > 0.999:
        phase.notes.append("almost nothing was pruned in so few steps by so low a pull: train longer, or raise pull")
    masked = 0 if keep is None else sum(keep.at(step / phase.total) < 1 for step in range(phase.total))
    if keep is not None and masked < FEW:
        phase.notes.append(
            f"{masked} of the phase's {phase.total} steps ran with pruned weights, too few to train the weights left "
            "without the rest; train longer"
        )


def hold_zeros(encoder: Encoder, names: list[str]) -> None:
    """From now on the zeros of these weights stay."""
    encoder.hold("zeros", [name.removesuffix(".weight") for name in names])


def note_density(phase: Phase, names: list[str], what: What, keep: float | None = None) -> float:
    """Say how many weights are left, of those that could be pruned, which is also given, and of all."""
    if not names:
        return 0.0  # what stores them in another form is in the same phase; the card counts them
    stored = dict(phase.encoder.named_parameters())
    apart = sparse_linears(phase.encoder).values()  # stored without their zeros by an earlier phase
    masked = sum(stored[name].numel() for name in names)
    left = sum(int(stored[name].count_nonzero()) for name in names)
    whole = sum(one.numel() for one in stored.values()) + sum(one.in_features * one.out_features for one in apart)
    gone = masked - left + sum(one.in_features * one.out_features - len(one.values) for one in apart)
    phase.notes.append(
        f"{left / masked:.2%} of the {masked:,} {'layer' if what == 'layers' else what} weights are left, "
        f"{(whole - gone) / whole:.2%} of all {whole:,} parameters"
    )
    if keep is not None and left < 0.98 * keep * masked:
        phase.notes.append(f"{keep:.2%} were to be kept, but fewer were left: zeros of earlier phases stay zero")
    return left / masked
