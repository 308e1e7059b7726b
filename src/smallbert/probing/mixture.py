"""Frozen, all layers at once: a learned mixture of them under a linear classifier, and what its shares say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from smallbert.measuring.metrics import Score
from smallbert.probing.features import Features, Say
from smallbert.probing.layers import headline
from smallbert.probing.roles import check_rows, labels_of
from smallbert.tasks.task import Task

STEPS = 600
STRENGTHS = (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0)  # C of the classifier, chosen on the rows that choose
BATCHES = 256, 1024  # examples at least, and at most where there are many
RATE, SHARE_RATE = 1e-2, 5e-2  # the scalars have their own: softmax of a dozen numbers hardly moves at the other
UNIFORM = 0.1  # bits; shares nearer to uniform than this have no centre worth the name
ONE = 0.2  # bits; shares nearer than this to one layer alone are that layer
SURE = 2.0  # standard errors


class Data(NamedTuple):
    """Features made ready: centred layer by layer, each dimension scaled alike in all layers.

    Neither changes what a mixture of the raw layers can say: the means go into the bias, and the scale belongs to the
    classifier that follows. So shares still mean shares of the raw layers.
    """

    features: Features
    mean: Tensor  # (layers, 1, width)
    scale: Tensor  # (width,)
    norms: np.ndarray  # mean length of a raw vector, layer by layer

    def batch(self, role: str, rows: np.ndarray) -> Tensor:
        """Some rows of a role, of all layers: (layers, rows, width)."""
        split, index = getattr(self.features.roles, role)
        taken = np.ascontiguousarray(self.features.splits[split][:, index[rows]])
        return (torch.from_numpy(taken).to(self.mean.device).float() - self.mean) * self.scale


class Arms(NamedTuple):
    """Several probes trained at once, one a row: which layers each may read, and how much its weights are held back."""

    allowed: Tensor  # (arms, layers) bool
    strength: Tensor  # (arms,)


def probe_mixture(
    features: Features, task: Task, seeds: Sequence[int], say: Say, device: str = "cpu", steps: int = 0
) -> dict[str, Any]:
    """Shares of a mixture over all layers, its score, and the scores of mixtures over layers 0 to l for every l."""
    steps = steps or STEPS
    labels = labels_of(task, features.roles)
    check_rows(task, labels["fit"])
    depth, data = features.depth, prepare(features, torch.device(device))
    split = task.split(features.roles.score[0])
    told, total = f"{task.name}: training mixtures", 2 * len(seeds) * steps

    def train(arms: Arms, seed: int, before: int) -> tuple[np.ndarray, list[float], list[Score]]:
        with one_thread():
            shares, choose, guesses = train_arms(
                data, task, labels, arms, seed, steps, lambda done: say(told, before + done, total, "")
            )
        return shares, choose, [headline(task, each, split) for each in guesses]

    whole = torch.ones(len(STRENGTHS), depth, dtype=torch.bool)
    first = [train(Arms(whole, torch.tensor(STRENGTHS)), seed, at * steps) for at, seed in enumerate(seeds)]
    best = int(np.argmax(np.mean([choose for _, choose, _ in first], 0)))
    shares = np.stack([each[best] for each, _, _ in first])
    parts = torch.ones(depth, depth, dtype=torch.bool).tril()[:-1]  # the last one is the whole mixture, trained above
    ladder = Arms(parts, torch.full((depth - 1,), STRENGTHS[best]))
    scores = []
    for at, seed in enumerate(seeds):
        below = train(ladder, seed, (len(seeds) + at) * steps)[2]
        scores.append([*below, first[at][2][best]])
    values = [each[-1]["value"] for each in scores]
    return {
        "classifier": f"softmax shares, gamma, linear layer; Adam, {steps} steps; C of {STRENGTHS}",
        "seeds": list(seeds),
        "strength": STRENGTHS[best],
        "edge": best in (0, len(STRENGTHS) - 1),  # whether a better one may lie outside
        "score": {**_spread(values), "stderr": float(np.mean([each[-1]["stderr"] for each in scores]))},
        **describe_shares(shares, data.norms),
        "cumulative": describe_ladder(
            [[each["value"] for each in row] for row in scores], [each["stderr"] for each in scores[0]]
        ),
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one core: these steps are too small to share, and cores that wait for each other are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare(features: Features, device: torch.device, chunk: int = 4096) -> Data:
    """Means, scales and lengths of the features, counted on the rows that train."""
    split, index = features.roles.fit
    layers, means, squares, norms = features.splits[split], [], [], []
    for layer in layers:
        rows = [np.asarray(layer[index[at : at + chunk]], np.float64) for at in range(0, len(index), chunk)]
        means.append(sum(part.sum(0) for part in rows) / len(index))
        squares.append(sum(((part - means[-1]) ** 2).sum(0) for part in rows) / len(index))
        norms.append(sum(float(np.linalg.norm(part, axis=1).sum()) for part in rows) / len(index))
    deviation = np.sqrt(np.mean(squares, 0))
    scale = 1 / np.where(deviation > 1e-6, deviation, 1)
    mean, shared = (torch.from_numpy(each).float().to(device) for each in (np.stack(means)[:, None], scale))
    return Data(features, mean, shared, np.array(norms))


def train_arms(
    data: Data, task: Task, labels: dict[str, np.ndarray], arms: Arms, seed: int, steps: int, tell: Any
) -> tuple[np.ndarray, list[float], list[np.ndarray]]:
    """Train all arms together on the same batches: shares (arms, layers), how good each is to choose, its guesses."""
    device = data.mean.device
    count, depth, width = len(arms.allowed), len(data.mean), len(data.scale)
    regress = task.kind == "regress"
    outputs = 1 if regress else len(task.labels)
    target = torch.from_numpy(labels["fit"]).to(device)
    if regress:
        target = ((target - target.mean()) / target.std().clamp(min=1e-9)).float()
    generator = torch.Generator().manual_seed(seed)
    # Every arm starts from the same weights, so that arms of one seed differ in nothing but their layers.
    start = torch.randn(1, width, outputs, generator=generator) / width
    weight = start.repeat(count, 1, 1).to(device).requires_grad_()
    bias = torch.zeros(count, 1, outputs, device=device, requires_grad=True)
    logits = torch.zeros(count, depth, device=device, requires_grad=True)
    gamma = torch.ones(count, 1, 1, device=device, requires_grad=True)
    closed = torch.zeros(count, depth).masked_fill(~arms.allowed, -math.inf).to(device)
    hold = (0.5 / (arms.strength * len(target))).to(device)
    groups = [{"params": [weight, bias], "lr": RATE}, {"params": [logits, gamma], "lr": SHARE_RATE}]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)

    def run(batch: Tensor) -> Tensor:
        shares = (logits + closed).softmax(1)
        mixed = (shares @ batch.flatten(1)).view(count, *batch.shape[1:])
        return torch.baddbmm(bias, gamma * mixed, weight)

    def losses(found: Tensor, wanted: Tensor) -> Tensor:
        if regress:
            return (found.squeeze(-1) - wanted).square().mean(1)
        each = nn.functional.cross_entropy(found.flatten(0, 1), wanted.repeat(count), reduction="none")
        return each.view(count, -1).mean(1)

    size = min(int(np.clip(len(target) // 32, *BATCHES)), len(target))
    order = np.empty(0, np.int64)
    for step in range(steps):
        if len(order) < size:
            order = np.concatenate([order, torch.randperm(len(target), generator=generator).numpy()])
        rows, order = order[:size], order[size:]
        loss = losses(run(data.batch("fit", rows)), target[torch.from_numpy(rows).to(device)])
        # What is held back is what the classifier really multiplies by: gamma must not grow for it to shrink.
        (loss + hold * (gamma * weight).square().sum((1, 2))).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        tell(step + 1)

    @torch.no_grad()
    def guess(role: str) -> np.ndarray:
        total = len(getattr(data.features.roles, role)[1])
        chunks = [np.arange(at, min(at + size, total)) for at in range(0, total, size)]
        found = [run(data.batch(role, rows)) for rows in chunks]
        return torch.cat([part.squeeze(-1) if regress else part.argmax(-1) for part in found], 1).cpu().numpy()

    choose = [_quality(each, labels["choose"], regress) for each in guess("choose")]
    return (logits + closed).detach().double().softmax(1).cpu().numpy(), choose, list(guess("score"))


def _quality(guesses: np.ndarray, labels: np.ndarray, regress: bool) -> float:
    if not regress:
        return float((guesses == labels).mean())
    return float(np.corrcoef(guesses, labels)[0, 1]) if np.ptp(guesses) and np.ptp(labels) else 0.0


def gravity(shares: np.ndarray) -> float:
    """The mean layer number under these shares.

    >>> gravity(np.array([0.0, 0.5, 0.5]))
    1.5
    """
    return float(np.arange(len(shares)) @ shares)


def bits(shares: np.ndarray) -> float:
    """How far shares are from uniform, KL(shares || uniform) in bits: 0 if uniform, log2(layers) if all is in one.

    >>> bits(np.array([0.0, 1.0, 0.0, 0.0]))
    2.0
    """
    some = shares[shares > 0]
    return max(float(np.log2(len(shares)) + (some * np.log2(some)).sum()), 0.0)


def correct(shares: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Shares of what really flows: a layer with long vectors needs a smaller share to say as much.

    >>> correct(np.array([0.5, 0.5]), np.array([1.0, 3.0]))
    array([0.25, 0.75])
    """
    return shares * norms / (shares * norms).sum(-1, keepdims=True)


def describe_shares(shares: np.ndarray, norms: np.ndarray) -> dict[str, Any]:
    """What the shares of several seeds, (seeds, layers), say about depth."""
    found: dict[str, Any] = {"norms": norms.tolist()}
    for name, each in (("plain", shares), ("corrected", correct(shares, norms))):
        found[name] = {
            "shares": each.mean(0).tolist(),
            "sd": each.std(0, ddof=1).tolist() if len(each) > 1 else None,
            "gravity": _spread([gravity(row) for row in each]),
            "bits": _spread([bits(row) for row in each]),
        }
        near, most = found[name]["bits"]["mean"], math.log2(each.shape[1])
        over = f", mean over {len(each)} seeds" if len(each) > 1 else ""
        found[name]["says"] = None
        if near < UNIFORM:
            found[name]["says"] = (
                f"the shares are nearly uniform (K = {near:.2f} bits{over}), so their centre of gravity means nothing"
            )
        elif near > most - ONE:
            found[name]["says"] = (
                f"nearly all lies on one layer (K = {near:.2f} of {most:.2f} bits{over}): it picks one rather than "
                f"averaging several{'; shares are means over seeds, which may pick others' * (len(each) > 1)}"
            )
    return found


def describe_ladder(values: list[list[float]], errors: list[float]) -> dict[str, Any]:
    """Scores of mixtures over layers 0 to l, (seeds, layers), the gain of each layer, and the layer expected to gain.

    >>> describe_ladder([[50, 50, 90, 90]], [1, 1, 1, 1])["expected_layer"]
    2.0
    """
    mean = np.mean(values, 0)
    gains = np.diff(mean)
    found: dict[str, Any] = {"scores": mean.tolist(), "gains": gains.tolist(), "by_seed": values, "stderr": errors}
    total, noise = float(gains.sum()), float(np.hypot(errors[0], errors[-1]))
    if total > SURE * noise:
        return {**found, "expected_layer": float(np.arange(1, len(mean)) @ gains / total), "why": None}
    why = (
        f"all layers together gain {total:+.1f} points over layer 0, not clearly above the noise of {SURE * noise:.1f}"
    )
    return {**found, "expected_layer": None, "why": why}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "sd": sd, "by_seed": [float(value) for value in values]}
