"""Presets: named recipes for systems of the literature, with where they come from and what was published for them."""

from smallbert.presets import distillation, pruning, students
from smallbert.presets.preset import Preset
from smallbert.recipes.registry import Registry

PRESETS: Registry[Preset] = Registry("preset")
for _row in (*pruning.ROWS, *distillation.ROWS, *students.ROWS):
    PRESETS.add(_row.name, _row)

__all__ = ["PRESETS", "Preset"]
