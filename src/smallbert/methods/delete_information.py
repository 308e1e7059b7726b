"""Gordon et al. 2020's control: weights are zeroed as by pruning, but then trained freely.

What a pruned model loses, it loses in information or in capacity. Here the zeros may grow back, so the capacity is
whole and only what the weights had learned is lost. Compare it with the same zeros held: prune(0.3, scope="local",
what="layers+pooler+embeddings") | finetune.
"""

from typing import Any, Literal

from smallbert.methods.pruning import OneShot
from smallbert.training.masks import What


class DeleteInformation(OneShot):
    """Set the smallest weights to zero once; later training may change them again.

    scope: 'local' keeps the share `keep` of every matrix, as the paper does, 'global' of all matrices taken together
    what: where weights are zeroed: 'layers' in all matrices of the layers; 'pooler' adds the pretrained dense layer
        above them, where there is one, and 'embeddings' the word embeddings. The paper zeroes in all three
    """

    scope: Literal["local", "global"] = "local"
    what: What = "layers+pooler+embeddings"

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Write the zeros, and let go of any that were held."""
        super().fill(encoder, before, plan, task, seed)
        encoder.release("zeros")
