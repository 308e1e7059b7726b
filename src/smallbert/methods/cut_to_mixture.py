"""Cutting a model to what its head reads: layers above the last one that matters do nothing but cost time."""

from itertools import accumulate
from typing import Any, Literal

import torch

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.encoder import HEAD
from smallbert.model.surgery import keep_layers
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, tokenise, usable_length

EXAMPLES = 256  # training texts on which is seen what varies


class CutToMixture(Method):
    """Drop the layers above the last one that the learned mixture, or a pooler, still reads.

    mass: share of the mixture that must lie in the layers that are kept
    weigh: 'shares' counts each layer by its weight in the mixture, 'variation' by that times how much its state differs
        from text to text
    """

    mass: float = 0.95
    weigh: Literal["shares", "variation"] = "shares"

    def check(self) -> None:
        """A share."""
        if not 0 < self.mass <= 1:
            raise UserError(f"cut_to_mixture: mass is a share above 0 and up to 1, not {self.mass}")

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """The layers that hold the mass, from the bottom up; all of them where the top is read too."""
        shares, reads = encoder.reading, getattr(encoder.head, "reads", None) if HEAD in encoder.heads else None
        if shares is None and reads is not None:  # a pooler without shares: only what it never reads can go
            return {"layers": list(range(max(1, reads[-1])))}
        if shares is None:
            raise UserError(
                "cut_to_mixture cuts a model whose head is a pooler or reads one learned mixture for all texts, and "
                "this one's does neither: put mix_layers before it, as in mix_layers | finetune | cut_to_mixture"
            )
        if self.weigh == "variation":
            weighed = [share * size for share, size in zip(shares, _variation(encoder, task), strict=True)]
            shares = [one / sum(weighed) for one in weighed]
        # The sum of all shares is 1 but for rounding, and must never ask for a layer that is not there.
        enough = (number for number, below in enumerate(accumulate(shares)) if below >= self.mass - 1e-6)
        last = max(1, next(enough, len(encoder.order)))
        return {"layers": list(range(last)), "shares": [round(share, 4) for share in shares]}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Cut; the mixture's weights of what is gone go to what stays."""
        keep_layers(encoder, plan["layers"])


@torch.inference_mode()
def _variation(encoder: Any, task: Any) -> list[float]:
    """How far each hidden state lies from its own mean over texts, in what the head looks at."""
    if task is None:
        raise UserError("cut_to_mixture(weigh='variation') reads training texts, so it needs a task: give --task")
    rows = task.split("train")
    stream = tokenise(
        encoder.tokenizer, rows.take(range(min(EXAMPLES, len(rows)))), task.kind, usable_length(encoder, None, task)
    )
    training, seen = encoder.training, []
    encoder.eval()
    first = encoder.head.reads_first if HEAD in encoder.heads else True
    for index in sort_into_batches(stream.views[STUDENT].lengths, 2**12):
        batch = make_batch(stream, index, Layout(False, 0)).to(encoder.device)
        states = encoder.states(batch).hidden
        seen.append(torch.stack([(batch.first if first else batch.mean)(state).float() for state in states]))
    encoder.train(training)
    texts = torch.cat(seen, 1)  # (states, texts, features)
    return (texts - texts.mean(1, keepdim=True)).square().sum(-1).mean(-1).sqrt().tolist()
