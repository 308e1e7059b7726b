"""Lottery tickets by iterative magnitude pruning (Frankle and Carbin 2019; Chen et al. 2020 for BERT).

Each round trains, prunes a further equal share of all weights, and sets the backbone back to its start, zeros
kept; the ticket is trained last. The head is not set back, and so neither is the pooler, which is part of it here.
"""

from typing import Any, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.recipes.combining import Combines
from smallbert.training.masks import What


class Lottery(Method):
    """Find a sparse subnetwork that trains from the initial weights: train, prune, rewind, round after round.

    keep: share of the weights that the ticket keeps; weights that are zero already count as pruned
    rounds: number of rounds of training, pruning and rewinding, each of which prunes equally many weights
    part: recipe that trains the model in every round, and the ticket at the end
    scope: 'local' keeps the same share of every matrix, 'global' compares the weights of all matrices
    what: 'layers' prunes all matrices of the layers; 'pooler' adds the pretrained dense layer above them, where there
        is one, and 'embeddings' the word embeddings. Biases, norms and the last layer of a head are never pruned
    """

    keep: float = 0.3
    rounds: int = 7
    part: Combines = "train(epochs=3, lr=2e-05)"  # type: ignore[assignment]
    scope: Literal["local", "global"] = "global"
    what: What = "layers+pooler"

    def check(self) -> None:
        """A share, and at least one round."""
        if not 0 < self.keep < 1:
            raise UserError(f"lottery: keep is a share between 0 and 1, not {self.keep}")
        if self.rounds < 1:
            raise UserError(f"lottery: rounds must be 1 or more, not {self.rounds}")

    def expand(self) -> Any:
        """Mark the start; train, prune, rewind; train the ticket."""
        from smallbert.recipes.recipe import Recipe

        start = f"start of lottery({self.keep}, rounds={self.rounds})"  # not a name that a user's own mark would have
        whole = Recipe(f"mark({start!r})")
        for number in range(1, self.rounds + 1):
            left = round(1 - (1 - self.keep) * number / self.rounds, 12)
            pruned = f"prune({left}, scope={self.scope!r}, what={self.what!r})"
            whole = whole | self.part | Recipe(f"{pruned} | rewind({start!r})")
        return whole | self.part
