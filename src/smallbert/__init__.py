"""Make BERT-family encoders small, measure what came out, and say which is the best.

>>> from smallbert import Recipe, distill, drop_layers, finetune, quantize
>>> Recipe("finetune | drop_layers(6) | distill | quantize(8)") == finetune | drop_layers(6) | distill | quantize(8)
True
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.2.0"

# Where each name lives. Nothing is imported until it is asked for, so that `import smallbert` stays instant.
NAMES = {
    "load": "smallbert.model.encoder",
    "Encoder": "smallbert.model.encoder",
    "save_folder": "smallbert.model.folders",
    "run_recipe": "smallbert.making.run",
    "evaluate": "smallbert.measuring.evaluate",
    "predict": "smallbert.serving.predictions",
    "Recipe": "smallbert.recipes.recipe",
    "expand_space": "smallbert.recipes.space",
    "PRESETS": "smallbert.presets",
    "METHODS": "smallbert.methods",
    "Method": "smallbert.methods",
    "load_task": "smallbert.tasks",
    "load_card": "smallbert.measuring.shelf",
    "load_cards": "smallbert.measuring.shelf",
    "save_card": "smallbert.measuring.shelf",
    "Budget": "smallbert.measuring.budget",
    "best": "smallbert.measuring.choice",
    "UserError": "smallbert.errors",
    "RunError": "smallbert.errors",
}


def __getattr__(name: str) -> Any:
    """A name of the table, or else a method, ready to use: `drop_layers`, and with settings `drop_layers(6)`."""
    if name in NAMES:
        return getattr(import_module(NAMES[name]), name)
    # Asking METHODS imports every method, which must not happen while Python only looks for a submodule.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        from smallbert.methods import METHODS

        if name in METHODS:
            method = METHODS[name]
            return method() if method.is_ready() else method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from smallbert.methods import METHODS

    return sorted({*globals(), *NAMES, *METHODS})
