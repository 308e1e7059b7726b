"""A dictionary of weights (GOBO, Zadeh et al. 2020): each names one of 2^bits centroids; the few outliers are kept.

A weight is an outlier if it lies further than `outliers` standard deviations from the mean of its matrix, in which
pruned ones do not count. The paper says a log-density below -4, which depends on the unit: at BERT's usual deviation of
0.04 it is 3.55 deviations. The others are sorted into 2^bits bins of equal count; then each goes to the nearest
centroid and each centroid to the mean of its bin, as long as the sum of distances falls (L1, where k-means would use
squares and take longer).
"""

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.methods.quantize import TEXTS, some_roundable
from smallbert.model.anatomy import replace_module
from smallbert.model.feedback import Coding, round_with_feedback
from smallbert.model.quantised import BookEmbedding, BookLinear
from smallbert.progress import tell
from smallbert.training.calibrate import draw_texts, input_products

Few = Literal[8, 6, 5, 4, 3, 2]
MOST = 100  # rounds, of which about seven are needed
PRUNED = 0.01  # the share of zeros from which on they must stay zeros
MANY = 0.1  # the share of outliers, eight bytes each, from which on little is saved by storing the others in few bits


class Codebook(Method):
    """Store each matrix as a few centroids, the index of one for each weight, and outliers in full.

    bits: bits per weight; each matrix has 2^bits centroids
    embeddings: bits per weight of the embedding tables; None takes `bits`
    outliers: distance from the mean of a matrix, in standard deviations, beyond which a weight is stored in full, in
        eight bytes
    feedback: whether weights of linear layers are assigned column by column, later columns correcting the errors of
        earlier ones on training texts (GPTQ), and outliers what they can; the paper has no feedback
    texts: number of training texts, drawn at random, that feedback uses
    """

    bits: Few = 3
    embeddings: Few | None = None
    outliers: float = 3.55
    feedback: bool = False
    texts: int = TEXTS

    def check(self) -> None:
        """A distance and a number of texts."""
        check_outliers(self.name, self.outliers)
        if self.texts < 1:
            raise UserError(f"{self.name}: texts is the number of texts to use, 1 or more, not {self.texts}")
        if self.texts != TEXTS and not self.feedback:
            raise UserError(f"{self.name}: texts={self.texts} is for feedback=True, which uses texts; leave it out")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """What is stored so, and how many outliers each has."""
        return {"outliers": count_outliers(encoder, self.name, self.outliers)}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Put empty modules in their places."""
        for name, count in plan["outliers"].items():
            old = encoder.get_submodule(name)
            made = BookEmbedding if isinstance(old, nn.Embedding) else BookLinear
            new = made(old, self.bits_of(old), count)
            replace_module(encoder, name, new.to(encoder.device))

    def bits_of(self, module: nn.Module) -> int:
        """How many bits name a centroid of a module's matrix."""
        return (isinstance(module, nn.Embedding) and self.embeddings) or self.bits

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Find the centroids of each matrix, and which of them each weight is."""
        layers = [name for name in plan["outliers"] if isinstance(encoder.get_submodule(name), BookLinear)]
        batches = draw_texts(before, task, self.texts, seed, self.name) if self.feedback else []
        products = input_products(before, layers, batches) if self.feedback else {}
        for number, name in enumerate(plan["outliers"]):
            weight, module = before.get_submodule(name).weight.detach(), encoder.get_submodule(name)
            apart = find_outliers(weight, self.outliers)
            table = make_table(weight, apart, module.bits)
            codes, made = nearest(weight, table), weight
            if name in products:
                codes, made = round_with_feedback(weight, products[name], code_by(table, apart))
            module.write(codes, table, apart, made)
            tell("codebook", number + 1, len(plan["outliers"]))


def check_outliers(name: str, deviations: float) -> None:
    """Refuse what is no distance."""
    if deviations <= 0:
        raise UserError(f"{name}: outliers is a number of standard deviations above 0, not {deviations}")


def count_outliers(encoder: Any, name: str, deviations: float) -> dict[str, int]:
    """How many outliers each matrix of a model has, by the name of its module; where that is most of them, a sentence.

    Those of a matrix whose weights are not known yet are as many as a normal distribution has.
    """
    weights = {part: encoder.get_submodule(part).weight for part in some_roundable(encoder, name)}
    usual = math.erfc(deviations / math.sqrt(2))
    counts = {
        part: round(weight.numel() * usual) if weight.is_meta else int(find_outliers(weight, deviations).sum())
        for part, weight in weights.items()
    }
    share = sum(counts.values()) / sum(weight.numel() for weight in weights.values())
    if share > MANY:
        raise UserError(
            f"{name}: with outliers={deviations:g}, {share:.0%} of the weights would be outliers and be "
            f"stored in full; give more standard deviations, such as {Codebook.outliers}"
        )
    return counts


def make_table(weight: Tensor, apart: Tensor, bits: int, zero: bool = False) -> Tensor:
    """The centroids of a matrix; where it was pruned, or will be, one is zero, and the others are of what is left."""
    if not zero and not _is_pruned(weight):
        return find_centroids(weight[~apart], 2**bits)
    others = find_centroids(weight[~apart & (weight != 0)], 2**bits - 1)
    return torch.cat([others, others.new_zeros(1)]).sort().values


def code_by(table: Tensor, apart: Tensor) -> Coding:
    """Codes of the nearest centroids, but for the numbers that stand apart."""
    wide = table.double()
    return Coding(lambda values, _: nearest(values, wide), lambda codes, _: wide[codes.long()], apart)


def find_outliers(weight: Tensor, deviations: float) -> Tensor:
    """Which numbers lie further than so many standard deviations from the mean; of a pruned matrix, of what is left."""
    weight = weight.detach()
    left = weight != 0 if _is_pruned(weight) else torch.ones_like(weight, dtype=torch.bool)
    if not left.any():
        return left
    values = weight[left]
    return left & ((weight - values.mean()).abs() > deviations * values.std(correction=0))


def _is_pruned(weight: Tensor) -> bool:
    return bool((weight == 0).float().mean() > PRUNED)


def find_centroids(values: Tensor, count: int) -> Tensor:
    """So many centroids, in rising order, by means of bins until the sum of distances no longer falls.

    Values are sorted once; a bin is then a stretch of them, and running sums give its mean and its distances. Where
    there are no more different values than that, they are the centroids, the last one repeated.
    """
    ordered = np.sort(values.detach().flatten().cpu().double().numpy())
    different = np.unique(ordered) if len(ordered) else np.zeros(1)
    if len(different) <= count:
        return torch.from_numpy(np.pad(different, (0, count - len(different)), "edge")).to(values.device, values.dtype)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    edges = np.linspace(0, len(ordered), count + 1).round().astype(np.int64)
    centroids = _means(sums, edges, np.zeros(count))
    best, least = centroids, np.inf
    for _ in range(MOST):
        edges = np.searchsorted(ordered, (centroids[1:] + centroids[:-1]) / 2)
        edges = np.concatenate([[0], edges, [len(ordered)]])
        error = _distances(ordered, sums, edges, centroids)
        if error >= least:
            break
        best, least = centroids, error
        centroids = _means(sums, edges, centroids)
    return torch.from_numpy(best).to(values.device, values.dtype)


def _means(sums: np.ndarray, edges: np.ndarray, empty: np.ndarray) -> np.ndarray:
    """The mean of each stretch; one without a number keeps what it had."""
    counts = np.diff(edges)
    return np.where(counts > 0, np.diff(sums[edges]) / np.maximum(counts, 1), empty)


def _distances(ordered: np.ndarray, sums: np.ndarray, edges: np.ndarray, centroids: np.ndarray) -> float:
    """The sum over all numbers of how far each is from the centroid of its stretch."""
    middle = np.clip(np.searchsorted(ordered, centroids), edges[:-1], edges[1:])
    below = centroids * (middle - edges[:-1]) - (sums[middle] - sums[edges[:-1]])
    above = sums[edges[1:]] - sums[middle] - centroids * (edges[1:] - middle)
    return float((below + above).sum())


def nearest(weight: Tensor, table: Tensor) -> Tensor:
    """The number of the nearest centroid of each weight; the table is in rising order."""
    edges = (table[1:] + table[:-1]) / 2
    return torch.bucketize(weight.contiguous(), edges, out_int32=True).to(torch.uint8)
