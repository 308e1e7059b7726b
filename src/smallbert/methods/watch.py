"""Watching a phase train: what reaches each layer, what the masks do, what the mixture reads, written on the card."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import anatomy
from smallbert.model.heads import losses
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT


class Watch(Method):
    """Record the state of training every `steps` steps: loss, gradients and spread by layer, masks, mixture.

    steps: steps between two records
    examples: training texts it is measured on, the same each time
    mask: with masks as they are at that step, or pruned to the final share
    """

    trains: ClassVar[bool] = True

    steps: int = 200
    examples: int = 64
    mask: Literal["current", "final"] = "current"

    def check(self) -> None:
        """Counts."""
        if self.steps < 1 or self.examples < 2:
            raise UserError(f"watch: steps is 1 or more and examples 2 or more, not {self.steps} and {self.examples}")

    def every(self) -> int:
        """Each so many steps."""
        return self.steps

    def look(self, phase: Any) -> None:
        """Look at the same few training examples each time, without dropout and with the weights as they are seen.

        With mask="final" every dial is turned to its end for the look, as the movement-pruning paper evaluates; what
        was pruned for good so far (smooth_movement, second_order) is seen as it is either way.
        """
        phase.encoder.eval()
        if self.mask == "final":
            phase.set_dials(1.0)
        with torch.compiler.set_stance("force_eager"):  # compiling a second time for a look now and then does not pay
            found = _look_at_examples(phase, self.examples)
        masks = self._look_at_masks(phase)
        phase.set_dials()
        phase.begin_training()
        if phase.encoder.reading is not None:
            found["mixture"] = _rounded(phase.encoder.reading)
        phase.remember("watch", found | masks)

    def _look_at_masks(self, phase: Any) -> dict[str, Any]:
        """Of the weights that are seen otherwise than stored: the share left in each layer, and what changed."""
        with torch.no_grad():
            stem = f"backbone.{anatomy(phase.encoder.backbone).layers}."
            seen = {name: one != 0 for name, one in phase.weights().items() if one.dim() == 2 and name.startswith(stem)}
        if not seen:
            return {}
        before, phase.masks_before = getattr(phase, "masks_before", None), seen
        layers: dict[str, list[str]] = {}
        for name in seen:
            layers.setdefault(name.removeprefix(stem).split(".")[0], []).append(name)
        found: dict[str, Any] = {"mask": self.mask}
        found["kept"] = [_share(seen[name] for name in names) for names in layers.values()]
        if before is None and phase.step > self.steps:
            phase.notes.append(
                "watch: changes before the first record after continuing from a checkpoint are not known"
            )
        if before is not None:
            found["churn"] = [_share(seen[name] ^ before[name] for name in names) for names in layers.values()]
        return found


def _look_at_examples(phase: Any, examples: int) -> dict[str, Any]:
    """Loss, accuracy, the share of the commonest prediction, and what each hidden state's first token is like.

    The examples have labels; where none has, there is no loss to tell, and nothing that it pulls at. Of text without
    a task the same words are hidden each time.
    """
    drawn = np.random.default_rng(0).permutation(len(phase.stream))
    labelled = drawn[phase.stream.is_labelled[drawn]]
    known = len(labelled) > 0
    stream, some = phase.stream.at((labelled if known else drawn)[:examples], 0)
    count = {"count": torch.tensor(float(stream.units(some)))}  # a loss a word, where words have losses
    batch = make_batch(stream, some, Layout(False, 0)).with_tensors(count).to(phase.device)
    with torch.enable_grad():
        step = phase.look_at({STUDENT: batch})
        loss = step.mean(losses(phase.encoder.heads[phase.head], step.scores, batch))
        hidden = [state for state in step.states.hidden if state.requires_grad and known]
        gradients = torch.autograd.grad(loss, hidden, allow_unused=True) if hidden else ()
    firsts = [batch.first(state).detach().float() for state in step.states.hidden]
    sizes = [None if one is None else float(batch.first(one).float().norm(dim=-1).mean()) for one in gradients]
    found: dict[str, Any] = {
        "loss": round(float(loss.detach()), 4) if known else None,
        # How strongly the loss pulls at each state; None where a frozen part lies below or nothing reads it.
        "gradients": _rounded([None] * (len(firsts) - len(sizes)) + sizes),
        # How much texts differ there, as a share of the state's own size: near 0, the state says nothing of the text.
        "spread": _rounded([float(one.std(0).norm() / one.norm(dim=-1).mean().clamp(min=1e-12)) for one in firsts]),
    }
    if phase.encoder.heads[phase.head].kind == "classify":
        guess = step.scores.argmax(-1)
        found["accuracy"] = round(100 * float((guess == batch.labels).float().mean()), 2) if known else None
        found["largest"] = round(100 * float(guess.bincount().max()) / len(guess), 2)
    return found


def _share(masks: Any) -> float:
    on = total = 0
    for mask in masks:
        on, total = on + int(mask.sum()), total + mask.numel()
    return float(f"{on / total:.4g}")


def _rounded(values: list[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in values]
