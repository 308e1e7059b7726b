"""What pruning methods have in common; no technique of its own."""

from typing import Any, ClassVar, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.training.masks import What, maskable, note_density, prune_once, settle_masks
from smallbert.training.ranking import Cuts, top
from smallbert.training.schedule import Schedule


class Gradual(Method, shared=True):
    """What every gradual pruning method has: more and more masked weights, from `begin` to `finish` of training.

    keep: share of the weights kept in the end; weights that are zero already count as pruned
    scope: 'local' keeps that share of every matrix, 'global' of all matrices taken together
    begin: share of the phase's steps before pruning begins
    finish: share of the phase's steps after which the share kept stays at `keep`
    shape: how the share kept falls from `begin` to `finish`: 'cubic' fast at first, then ever more slowly; 'linear' at
        a steady rate; 'constant' at once, at `begin`
    first: share kept at `begin`; below 1, pruning starts with a drop. Not used with shape='constant'
    stairs: number of drops in which the share kept falls, evenly spaced in time, the last at `finish`; 0 lets it fall
        at every step
    what: 'layers' prunes all matrices of the layers; 'pooler' adds the pretrained dense layer above them, where there
        is one, and 'embeddings' the word embeddings. Biases, norms and the last layer of a head are never pruned
    """

    trains: ClassVar[bool] = True
    prunes: ClassVar[bool] = True
    stage: ClassVar[int] = 30

    keep: float = 0.1
    scope: Literal["local", "global"] = "local"
    begin: float = 0.1
    finish: float = 0.7
    shape: Literal["cubic", "linear", "constant"] = "cubic"
    first: float = 1.0
    stairs: int = 0
    what: What = "layers"

    def check(self) -> None:
        """A share, and a ramp inside the phase."""
        check_share(self)
        if not 0 < self.first <= 1:
            raise UserError(f"{self.name}: first is a share above 0 and up to 1, not {self.first}")
        if self.stairs < 0:
            raise UserError(f"{self.name}: stairs is a number of drops, or 0 for a smooth fall, not {self.stairs}")
        if self.shape == "constant" and (self.first, self.stairs) != (type(self).first, 0):
            raise UserError(
                f"{self.name}: shape='constant' prunes at once, at `begin`, so first and stairs have no effect; "
                "leave them out"
            )
        check_ramp(self)

    def schedule(self) -> Schedule:
        """Which share of the weights is seen, by how much of the phase is done."""
        before = None if self.first == 1 and self.shape != "constant" else 1.0
        return Schedule(max(self.first, self.keep), self.keep, self.begin, self.finish, self.shape, self.stairs, before)

    def cuts(self, phase: Any) -> Cuts:
        """Where scores are cut, which follows the dial "keep"."""
        return top(phase.dial("keep", self.schedule()), self.scope)

    def settle(self, phase: Any) -> None:
        """The zeros stay zeros."""
        settle_masks(phase, self.what)


class OneShot(Method, shared=True):
    """What methods have that write zeros once.

    keep: share of the weights kept; weights that are zero already count as pruned
    scope: 'local' keeps that share of every matrix, 'global' of all matrices taken together
    by: 'magnitude' keeps the largest weights; 'random' keeps some drawn at random from those that are not zero, the
        floor that any criterion has to beat
    what: 'layers' prunes all matrices of the layers; 'pooler' adds the pretrained dense layer above them, where there
        is one, and 'embeddings' the word embeddings. Biases, norms and the last layer of a head are never pruned
    """

    prunes: ClassVar[bool] = True
    stage: ClassVar[int] = 30

    keep: float = 0.5
    scope: Literal["local", "global"] = "global"
    by: Literal["magnitude", "random"] = "magnitude"
    what: What = "layers"

    def check(self) -> None:
        """A share."""
        check_share(self)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Write the zeros; what was zero before counts among them."""
        prune_once(encoder, maskable(encoder, self.what), self.keep, self.scope, self.by, seed)

    def settle(self, phase: Any) -> None:
        """Say how many weights are left."""
        note_density(phase, maskable(phase.encoder, self.what), self.what, self.keep)


def check_share(method: Any) -> None:
    """What is kept is a part, neither nothing nor all."""
    if not 0 < method.keep < 1:
        raise UserError(f"{method.name}: keep is a share between 0 and 1, not {method.keep}")


def check_ramp(method: Any) -> None:
    """A ramp from `begin` to `finish` lies inside the phase."""
    if not 0 <= method.begin <= method.finish <= 1:
        raise UserError(f"{method.name}: begin and finish are shares of the phase, 0 <= begin <= finish <= 1")


def freeze_backbone(phase: Any) -> None:
    """Leave every weight of the backbone as it is while the phase trains; dropout goes on."""
    phase.frozen += list(phase.encoder.backbone.parameters())
