"""The single files of a model folder: tensors, JSON, the tokenizer; what cannot be read is said in one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from smallbert.errors import UserError
from smallbert.machine.files import write_json
from smallbert.model.anatomy import anatomy
from smallbert.model.encoder import Encoder

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "spm.model", "sentencepiece.bpe.model")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; a full disk is an OSError here too, so that write_folder can say so.

    Who may read it is said by the umask, as of any other file; safetensors would let nobody else.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_tensors(path: Path, only_check: bool = False) -> dict[str, Tensor]:
    """Read a safetensors file, or say in one sentence why it cannot be read."""
    try:
        if only_check:
            with safe_open(path, "pt"):
                return {}
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; save or download the model again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); save or download the model again") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds names with values."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(
            f"{path} cannot be read: it holds a {type(found).__name__} where names with values are expected"
        )
    return found


def save_tokenizer(encoder: Encoder, folder: Path) -> None:
    """Save the tokenizer so that Hugging Face gives the model token types where it knows them, as we do."""
    try:
        encoder.tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library has no error class of its own for a full disk
        raise OSError(str(error)) from error
    about = folder / "tokenizer_config.json"
    if anatomy(encoder.backbone).token_types and getattr(encoder.backbone.config, "type_vocab_size", 0) > 1:
        write_json(about, read_json(about) | {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]})


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder, or None where there is none."""
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in VOCABULARIES):
        return None  # transformers would make up one that knows no word
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = str(error).strip().split("\n")[0]
        raise UserError(
            f"the tokenizer in {path} cannot be read ({type(error).__name__}: {said}); put tokenizer.json and "
            "tokenizer_config.json of the same model there again"
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers load without its own bars and tables: what matters of them is checked and said here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
