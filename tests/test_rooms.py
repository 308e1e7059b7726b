"""Each line of code knows its room, and a room knows only those below it."""

import ast
import re
from pathlib import Path

import smallbert

SOURCE = Path(smallbert.__file__).parent
README = Path(__file__).parent.parent / "README.md"
# From the lowest to the highest; rooms of one line know each other. What a method is, in methods/__init__.py, is part
# of the language, and the techniques themselves stand above all that they use.
ROOMS = [
    "errors progress",
    "machine",
    "recipes presets methods.__init__",
    "sources wheels",
    "model",
    "tasks",
    "texts",
    "features training",
    "measuring",
    "methods",
    "tiny",
    "making",
    "studies",
    "tuning probing",
    "onnxfile export",
    "serving",
    "bench",
    "report",
    "cli",
]
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms.split()}
FRONT = (SOURCE / "__init__.py", SOURCE / "__main__.py")
FILES = sorted(path for path in SOURCE.rglob("*.py") if path not in FRONT)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def level_of(module: str) -> int:
    name = module.removeprefix("smallbert.")
    return LEVELS["methods.__init__" if name == "methods" else name.split(".")[0]]


def imported(path: Path) -> set[str]:
    """What a file imports of smallbert as soon as it is imported itself; what a function imports may look up."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module == "smallbert":
            found |= {f"smallbert.{name.name}" for name in node.names if not name.name.startswith("__")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smallbert."):
            found.add(str(node.module))
    return found


def test_imports_go_downwards() -> None:
    up = [
        f"{module_of(path)} imports {name}, which stands above it"
        for path in FILES
        for name in sorted(imported(path))
        if level_of(name) > level_of(module_of(path))
    ]
    assert up == []


def test_transformers_is_imported_where_models_are_made_or_read() -> None:
    """It takes seconds, and much is said and refused without a model. These two files extend classes of its own."""
    early = {
        module_of(path) for path in FILES for node in ast.parse(path.read_text()).body if names(node, "transformers")
    }
    assert early == {"smallbert.model.bilstm", "smallbert.onnxfile.trace"}


def names(node: ast.stmt, library: str) -> bool:
    """Whether a statement is an import of a library or a part of it."""
    known = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    known += [each.name for each in node.names] if isinstance(node, ast.Import) else []
    return any(name.split(".")[0] == library for name in known)


def test_every_room_is_shown_in_the_readme() -> None:
    shown = README.read_text().split("## File tree")[1]
    rooms = {
        path.stem if path.suffix else f"{path.name}/" for path in SOURCE.iterdir() if not path.name.startswith("_")
    }
    assert [room for room in sorted(rooms) if not re.search(rf"\b{room}", shown)] == []
