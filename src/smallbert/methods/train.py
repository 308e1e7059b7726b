"""How long, how fast and in what batches a phase trains."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from smallbert.errors import UserError
from smallbert.methods import Method


class Train(Method):
    """Set epochs, learning rate and batch size of its phase.

    epochs: passes over the training texts; 0.5 is half of one
    lr: highest learning rate, reached after the warm-up and lowered in a straight line to 0
    batch: texts per step, over all processes together
    warmup: share of the steps in which the learning rate rises from 0
    weight_decay: AdamW's, of matrices; biases, norms, single scalars and whatever has its own learning rate have none
    clip: largest norm of all gradients together; larger ones are scaled down to it; 0 does not clip. A detached pooler
        beside a plain head is clipped by itself
    dropout: rate of every dropout in the encoder; None keeps the model's own
    freeze: what is not trained: nothing, the embeddings, or the whole backbone, so that only the head learns, and a
        mixture of layers if there is one
    layout: 'packed' concatenates texts without padding, 'padded' sorts them into batches of similar length; 'auto'
        packs on a GPU, with half=True, where the attention of all models that run allows it
    half: whether a GPU computes in bfloat16; CPUs always compute in float32
    graphs: whether a GPU records a step once and replays it (CUDA graphs), which saves launching each kernel
    compile: whether torch compiles layers, on a GPU; None does it for phases long enough for it to pay. Layers whose
        attention, queries, keys or values are compared are never compiled
    store: hidden states of a frozen backbone: 'auto' keeps them where that pays, 'none' computes them at every step,
        anything else is a folder that `smallbert features build` has written
    cache: teachers' outputs: 'auto' computes them beforehand where that pays and deletes them afterwards, 'none' runs
        teachers at every step, anything else is a folder where they are kept for other runs, vectors in float16
    """

    trains: ClassVar[bool] = True
    is_train_setting: ClassVar[bool] = True

    epochs: float = 3.0
    lr: float = 5e-5
    batch: int = 32
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    dropout: float | None = None
    freeze: Literal["nothing", "embeddings", "backbone"] = "nothing"
    layout: Literal["auto", "packed", "padded"] = "auto"
    half: bool = True
    graphs: bool = True
    compile: bool | None = None
    store: str = "auto"
    cache: str = "auto"

    def fits(self, phase: Any, steps: int | None) -> None:
        """A store that is named is there."""
        if self.store not in ("auto", "none"):
            from smallbert.features.store import open_store

            open_store(self.store)

    def check(self) -> None:
        """Refuse what cannot train."""
        for name in ("epochs", "lr", "batch"):
            if getattr(self, name) <= 0:
                raise UserError(f"{self.name}: {name} must be more than 0, not {getattr(self, name)}")
        if self.store not in ("auto", "none") and self.freeze != "backbone":
            raise UserError(
                f"{self.name}: store={self.store!r} has stored hidden states, which are valid only with "
                "freeze='backbone'; add that, or leave store out"
            )
        if not self.cache.strip():
            raise UserError(f"{self.name}: cache is auto, none or a folder, not {self.cache!r}")
        if self.cache not in ("auto", "none") and Path(self.cache).expanduser().is_file():
            raise UserError(f"{self.name}: cache={self.cache!r} is a file; name a folder, which may be a new one")
        if not 0 <= self.warmup < 1:
            raise UserError(f"{self.name}: warmup is a share of the steps from 0 to below 1, not {self.warmup}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UserError(f"{self.name}: dropout is a share from 0 to below 1, not {self.dropout}")
