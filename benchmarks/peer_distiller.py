"""The same distillation by TextBrewer and by smallbert: the loss of a text, the time of a step, the score afterwards.

    pip install --no-deps textbrewer==0.2.1.post1 tensorboardX
    python benchmarks/peer_distiller.py e5-small --task sst2 --data data --out results/peer_distiller

A fine-tuned model teaches three of its own layers: scores by cross entropy at temperature 4, and hidden states of all
layers by their mean square. Both begin with the same weights and see the same texts as often, with the same AdamW,
rates and clipping. They differ in what each does by itself: users of TextBrewer pad batches themselves (here to 128
tokens, or to the longest text of a batch), and its teacher runs at every step; smallbert puts texts of like length
together and runs the teacher once. Steps are timed in turns; a ratio is the median over rounds. TextBrewer writes no
checkpoints here.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from cells import to_cell
from teacher_cache import phase_of
from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

from smallbert.machine.facts import machine, versions
from smallbert.machine.files import write_json
from smallbert.making.run import run_recipe
from smallbert.making.starting import start_from, task_from
from smallbert.measuring.evaluate import evaluate
from smallbert.model.encoder import Encoder
from smallbert.model.folders import load_folder, save_folder
from smallbert.tasks import Task
from smallbert.tasks.derived import limit
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, Stream, tokenise
from smallbert.training.loop import next_step, ready, stepper

LAYERS, TEMPERATURE, BATCH, RATE = 3, 4.0, 32, 1e-4
RECIPE = (
    "align('hidden', layers='whole', weight={matches}, teacher={teacher!r}) "
    "+ distill(teacher={teacher!r}, alpha=1.0, temperature={temperature}, metric='ce') "
    "+ train(epochs={epochs}, batch={batch}, lr={rate}, warmup=0.1, weight_decay=0.01, clip=1.0, cache={cache!r})"
)
PEERS = {"TextBrewer, padded to 128 tokens": 128, "TextBrewer, padded to the longest of a batch": None}
OURS = {"smallbert, the teacher running at every step": "none", "smallbert, the teacher cached": "auto"}


class Silent(GeneralDistiller):
    """TextBrewer's own distiller, but for its checkpoints."""

    def save_and_callback(self, *_: Any) -> None:
        """Write nothing: what is compared is training."""


class Padded:
    """Shuffled batches of tokens as a user of TextBrewer makes them, epoch after epoch."""

    def __init__(self, stream: Stream, length: int | None, seed: int):
        """Padded to a length, or to the longest text of each batch."""
        self.stream, self.length = stream, length
        self.draw = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """One epoch."""
        for some in torch.randperm(len(self.stream), generator=self.draw).split(BATCH):
            yield to_inputs(self.stream, some.numpy(), self.length)


def to_inputs(stream: Stream, index: np.ndarray, length: int | None = None) -> dict[str, torch.Tensor]:
    """Texts as a Hugging Face model takes them."""
    batch = make_batch(stream, index, Layout(False, 0))
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    more = 0 if length is None else length - mask.shape[1]  # the pad token of a BERT is number 0
    made = {"input_ids": batch.input_ids, "token_type_ids": batch.token_type_ids, "attention_mask": mask}
    return {name: torch.nn.functional.pad(one, (0, more)) for name, one in made.items()}


def distiller(teacher: str, student: str) -> Silent:
    """TextBrewer with the losses of RECIPE."""
    models = [AutoModelForSequenceClassification.from_pretrained(folder) for folder in (teacher, student)]
    each = models[0].config.num_hidden_layers // LAYERS
    matches = [
        {"layer_T": place * each, "layer_S": place, "feature": "hidden", "loss": "hidden_mse", "weight": 1}
        for place in range(LAYERS + 1)
    ]
    config = DistillationConfig(TEMPERATURE, kd_loss_weight=TEMPERATURE**2, intermediate_matches=matches)

    def seen(batch: dict[str, torch.Tensor], found: Any) -> dict[str, Any]:
        return {"logits": found.logits, "hidden": found.hidden_states, "inputs_mask": batch["attention_mask"]}

    settings = TrainingConfig(device="cpu", log_dir=None, output_dir=tempfile.gettempdir(), ckpt_steps=10**9)
    return Silent(settings, config, *models, seen, seen)


def train_on(peer: Silent, batches: Padded, steps: int, optimiser: Any, schedule: Any) -> None:
    """Some steps of TextBrewer's own loop."""
    with peer:  # the teacher in evaluation, the student in training
        peer.train(
            optimiser, batches, num_steps=steps, max_grad_norm=1.0, scheduler=schedule, output_hidden_states=True
        )


def optimiser_of(peer: Silent, total: int) -> tuple[Any, Any]:
    """AdamW without decay of biases and norms, with warm-up and a linear way down."""
    named = list(peer.model_S.named_parameters())
    groups = [
        {"params": [one for _, one in named if one.dim() > 1], "weight_decay": 0.01},
        {"params": [one for _, one in named if one.dim() < 2], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=RATE, eps=1e-8)
    return optimiser, get_linear_schedule_with_warmup(optimiser, round(0.1 * total), total)


def recipe(teacher: str, cache: str, epochs: int) -> str:
    """What smallbert trains."""
    facts = {"teacher": teacher, "cache": cache, "epochs": epochs, "matches": LAYERS + 1}
    return RECIPE.format(**facts, temperature=TEMPERATURE, batch=BATCH, rate=RATE)


def compare_losses(teacher: str, student: str, task: Task, texts: int = 20) -> float:
    """How far apart the losses of a text are at most, as a share; of one text, a mean over texts is one over tokens."""
    peer, apart = distiller(teacher, student), []
    phase = phase_of(recipe(teacher, "none", 1), load_folder(Path(student)), task, "cpu")
    assert phase.stream is not None
    for model in (peer.model_T, peer.model_S, phase.encoder):
        model.eval()
    for index in np.arange(texts)[:, None]:
        ours = phase.loss({STUDENT: make_batch(phase.stream, index, Layout(False, 0))}).item()
        theirs = peer.train_on_batch(to_inputs(phase.stream, index), {"output_hidden_states": True})[0].item()
        apart.append(abs(ours - theirs) / theirs)
    return max(apart)


def time_steps(teacher: str, student: str, task: Task, stream: Stream, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds a step of every arm, in turns, and how many times faster than TextBrewer at its best."""
    ways: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, length in PEERS.items():
            peer = distiller(teacher, student)
            ways[name] = (train_on, peer, Padded(stream, length, 0), steps, *optimiser_of(peer, 10**6))
        epochs = steps * (rounds + 1) * BATCH // len(stream) + 2
        for name, cache in OURS.items():
            phase = phase_of(recipe(teacher, cache, epochs), load_folder(Path(student)), task, "cpu")
            plan = stack.enter_context(ready(phase, lambda *_: None))
            phase.begin_training()
            ways[name] = (take_steps, phase, plan, stepper(phase), steps)
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):  # the first one is to warm up
            for name, (take, *given) in ways.items():
                begun = time.perf_counter()
                take(*given)
                took[name].append((time.perf_counter() - begun) / steps * 1e3)
    best = took[list(PEERS)[1]][1:]
    rows = []
    for name, times in took.items():
        ratios = [theirs / mine for theirs, mine in zip(best, times[1:], strict=True)]
        rows.append({"arm": name, "ms a step": round(median(times[1:]), 1), "times faster": round(median(ratios), 2)})
        rows[-1]["rounds"] = [round(ratio, 2) for ratio in ratios]
        print(rows[-1], flush=True)
    return rows


def take_steps(phase: Any, plan: Any, take: Any, steps: int) -> None:
    """Some steps of our loop."""
    for _ in range(steps):
        next_step(phase, plan, take)


def score_both(teacher: str, student: str, task: Task, stream: Stream, epochs: int, seeds: int) -> list[dict[str, Any]]:
    """Accuracy on dev of a student that each has trained, seed by seed."""
    metric, total = task.metrics[0], epochs * -(-len(stream) // BATCH)
    found: dict[str, list[float]] = {"TextBrewer": [], "smallbert": []}
    for seed in range(seeds):
        torch.manual_seed(seed)
        peer = distiller(teacher, student)
        train_on(peer, Padded(stream, None, seed), total, *optimiser_of(peer, total))
        with tempfile.TemporaryDirectory() as folder:
            peer.model_S.save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (Path(folder) / name).write_bytes((Path(student) / name).read_bytes())
            found["TextBrewer"].append(evaluate(load_folder(Path(folder)), task)["scores"][metric]["value"])
        made = run_recipe(recipe(teacher, "auto", epochs), load_folder(Path(student)), task, seed=seed, device="cpu")
        found["smallbert"].append(evaluate(made.encoder, task)["scores"][metric]["value"])
        print(f"seed {seed}:", {name: round(scores[-1], 2) for name, scores in found.items()}, flush=True)
    return [{"by": name, metric: to_cell(scores, 0), "seeds": scores} for name, scores in found.items()]


def main() -> None:
    """Compare, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--data")
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="of one arm in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="results/peer_distiller")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    task = limit(task_from(options.task, options.data), options.examples)
    metric = task.metrics[0]
    with tempfile.TemporaryDirectory() as aside:
        teacher, student = f"{aside}/teacher", f"{aside}/student"
        tuned: Encoder = run_recipe("finetune(epochs=1)", start_from(options.model).encoder, task, device="cpu").encoder
        save_folder(tuned, teacher)
        save_folder(run_recipe(f"drop_layers({LAYERS})", tuned, task, device="cpu").encoder, student)
        stream = tokenise(tuned.tokenizer, task.split("train"), task.kind, 128)
        given = ("task", "examples", "epochs", "seeds", "steps", "rounds")
        command = " ".join(f"--{name} {getattr(options, name)}" for name in given)
        facts: dict[str, Any] = {
            "benchmark": "peer_distiller",
            "command": f"python benchmarks/peer_distiller.py {Path(options.model).name} --data data {command}",
            "losses of a text apart, at most": compare_losses(teacher, student, task),
            "teacher": evaluate(tuned, task)["scores"][metric]["value"],
        }
        print(facts, flush=True)
        facts["scores"] = score_both(teacher, student, task, stream, options.epochs, options.seeds)
        torch.set_num_threads(1)
        facts["rows"] = time_steps(teacher, student, task, stream, options.steps, options.rounds)
        write_json(Path(options.out) / f"{options.task}.json", {**facts, "versions": versions(), "machine": machine()})


if __name__ == "__main__":
    main()
