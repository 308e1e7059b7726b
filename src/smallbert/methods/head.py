"""The task head: put on by itself when an encoder has none for the task, or by name to choose how it pools."""

from typing import Any, ClassVar, Literal

import torch

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model import heads
from smallbert.model.answering import in_words
from smallbert.model.encoder import HEAD, PLAIN
from smallbert.progress import note


class Head(Method):
    """Put a new head for the task on the encoder.

    pool: what a head for whole texts reads: the first token, or the mean of all tokens
    """

    stage: ClassVar[int] = 0

    pool: Literal["first", "mean"] = "first"

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """The kind and size of the head follow from the task."""
        if task is None:
            raise UserError("a head is made for a task, and none was given: give --task")
        outputs = {"regress": 1, "answer": 2}.get(task.kind, len(task.labels))
        from_pooler = encoder.pooler is not None and task.kind in ("classify", "regress")
        return {"kind": task.kind, "labels": list(task.labels), "outputs": outputs, "from_pooler": from_pooler}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """A pretrained pooler becomes the head's dense layer."""
        head = heads.Head(plan["kind"], plan["outputs"], encoder.backbone.config, plan["labels"], self.pool)
        if plan["from_pooler"] and head.dense is not None:
            head.dense = encoder.pooler
        encoder.pooler = None
        if PLAIN in encoder.heads:
            del encoder.heads[PLAIN]
        encoder.heads[HEAD] = head.to(encoder.device)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Draw the new weights; what came from the pooler stays."""
        if HEAD in before.heads and (was := in_words(before.heads[HEAD])) != (now := in_words(encoder.head)):
            note(f"the head for {was} was replaced by a new one for {now}")
        head = encoder.head
        kept = head.dense if plan["from_pooler"] else None
        head.to("cpu")
        if kept is not None:
            head.dense = None
        heads.initialise(head, getattr(encoder.backbone.config, "initializer_range", 0.02), _generator(seed))
        if kept is not None:
            head.dense = kept
        head.to(encoder.device)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
