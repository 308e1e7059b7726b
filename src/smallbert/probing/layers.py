"""Frozen, layer by layer: a linear classifier on each layer's features, beside one that learns random labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from smallbert.errors import UserError
from smallbert.measuring.metrics import Score, score
from smallbert.probing.roles import ROLES, Labels, Roles, check_rows, control_labels, labels_of
from smallbert.tasks.task import Split, Task

if TYPE_CHECKING:
    from smallbert.probing.features import Features, Say

STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # C of logistic regression: the smaller, the more its weights are held back
SHRINKAGES = (0.001, 0.01, 0.1)
STEPS = 300  # of L-BFGS at most
MANY = 64  # classes; beyond these logistic regression takes minutes a layer and the closed form less than a second


def probe_layers(features: Features, task: Task, seeds: Sequence[int], say: Say) -> dict[str, Any]:
    """Scores of a linear probe on every layer, its control and its selectivity; layer 0 is the embedding output.

    >>> probe_layers(features, task, [0, 1, 2], say)["layers"][3]
    {'layer': 3, 'score': {'value': 84.1, …}, 'strength': 0.1, 'control': {…}, 'selectivity': {…}, …}
    """
    check_sklearn()
    from joblib import Parallel, cpu_count, delayed
    from threadpoolctl import threadpool_limits

    labels = labels_of(task, features.roles)
    check_rows(task, labels["fit"])
    controls = [control_labels(task, features.roles, seed) for seed in seeds]
    depth, method = features.depth, _method(task)
    jobs = (
        delayed(_probe_layer)({role: features.rows(role, layer) for role in ROLES}, labels, controls, method)
        for layer in range(depth)
    )
    found: list[dict[str, Any]] = []
    # A layer to each core: cores that share one product wait for each other, on a busy machine 50 times as long.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a probe stopped at its last step is in the result
        for answer in Parallel(n_jobs=min(cpu_count(), depth), backend="threading", return_as="generator")(jobs):
            found.append(_describe(len(found), answer, task, features, controls))
            say(f"{task.name}: probing layers", len(found), depth, "")
    best = max(found, key=lambda layer: layer["score"]["value"])
    return {
        "classifier": CLASSIFIERS[method],
        "best": best["layer"],
        "layers": found,
    }


def _describe(
    layer: int, answer: dict[str, Any], task: Task, features: Features, controls: list[Labels]
) -> dict[str, Any]:
    """What one layer scored, in words and with error bars."""
    split = task.split(features.roles.score[0])
    real = headline(task, answer["guesses"], split)
    wrong = [
        headline(task, guesses, _relabelled(split, labels["score"]))
        for guesses, labels in zip(answer["control"], controls, strict=True)
    ]
    values = [each["value"] for each in wrong]
    error = float(np.hypot(real["stderr"], np.mean([each["stderr"] for each in wrong])))
    return {
        "layer": layer,
        "score": real,
        "strength": answer["strength"],
        "converged": answer["converged"],
        "control": {"value": float(np.mean(values)), "by_seed": values, "train": float(np.mean(answer["memorised"]))},
        "selectivity": {"value": real["value"] - float(np.mean(values)), "stderr": error},
    }


def _probe_layer(layer: dict[str, np.ndarray], labels: Labels, controls: list[Labels], method: str) -> dict[str, Any]:
    """Fit the probe of one layer: what it says of the rows to score, and the same for each set of random labels."""
    rows = standardise({role: np.asarray(values, np.float32) for role, values in layer.items()})
    best, chosen, strength = -np.inf, None, 0.0
    for value in GRIDS[method]:
        fitted = _fit(method, value, rows["fit"], labels["fit"])
        right = fitted.score(rows["choose"], labels["choose"])
        if right > best:
            best, chosen, strength = right, fitted, value
    assert chosen is not None
    guesses, memorised = [], []
    for each in controls:
        fitted = _fit(method, strength, rows["fit"], each["fit"])
        guesses.append(fitted.predict(rows["score"]))
        memorised.append(100 * fitted.score(rows["fit"], each["fit"]))
    steps = getattr(chosen, "n_iter_", None)  # what is solved in closed form has none
    return {
        "guesses": chosen.predict(rows["score"]),
        "strength": strength,
        "converged": steps is None or bool(np.max(steps) < STEPS),
        "control": guesses,
        "memorised": memorised,
    }


def _fit(method: str, strength: float, rows: np.ndarray, labels: np.ndarray) -> Any:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.linear_model import LogisticRegression, Ridge

    makers = {
        "logistic": lambda: LogisticRegression(C=strength, max_iter=STEPS, solver="lbfgs"),
        "discriminant": lambda: LinearDiscriminantAnalysis(solver="lsqr", shrinkage=strength),
        "ridge": lambda: Ridge(alpha=1 / strength),
    }
    return makers[method]().fit(rows, labels)


def _method(task: Task) -> str:
    return "ridge" if task.kind == "regress" else "logistic" if len(task.labels) <= MANY else "discriminant"


GRIDS = {"logistic": STRENGTHS, "ridge": STRENGTHS, "discriminant": SHRINKAGES}
CLASSIFIERS = {
    "logistic": f"LogisticRegression, lbfgs, at most {STEPS} steps, C of {STRENGTHS}",
    "ridge": f"Ridge, 1/alpha of {STRENGTHS}",
    "discriminant": f"LinearDiscriminantAnalysis, lsqr, shrinkage of {SHRINKAGES} (more than {MANY} classes)",
}


def standardise(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each feature with mean 0 and deviation 1 over the rows to fit; one that only wavers by rounding becomes 0.

    The first token's embedding is the same in every text. Its last bits follow the batch, so the text's length, and
    blown up to deviation 1 they would be a feature.
    """
    mean, deviation = rows["fit"].mean(0), rows["fit"].std(0)
    steady = deviation <= np.abs(mean) * 2.0**-10 + 1e-6
    scale = np.where(steady, 0, 1 / np.where(steady, 1, deviation))
    return {role: ((values - mean) * scale).astype(np.float32) for role, values in rows.items()}


def chance(task: Task, roles: Roles) -> float:
    """What always giving train's most frequent label scores."""
    split = task.split(roles.score[0])
    values, counts = np.unique(labels_of(task, roles)["fit"], return_counts=True)
    return headline(task, np.full(len(split), values[counts.argmax()]), split)["value"]


def headline(task: Task, guesses: Iterable[Any], split: Split) -> Score:
    """The task's main metric of some predictions, with its error bar."""
    main = task.metrics[:1]  # the others would be resampled a thousand times for nothing
    return score(replace(task, metrics=main), np.asarray(guesses), split)[main[0]]  # type: ignore[arg-type]


def _relabelled(split: Any, labels: np.ndarray) -> Any:
    return replace(split, labels=labels.tolist())


def check_sklearn() -> None:
    """Refuse to go on without scikit-learn, saying how to get it."""
    if find_spec("sklearn") is None:
        raise UserError("probing layers needs scikit-learn; run: pip install -c constraints.txt -e '.[probe]'")
