"""Saving an encoder to a folder and loading it back; where its shape is standard, Hugging Face can load it too.

A folder holds model.safetensors, encoder.json (config, history, layout) and the tokenizer's files. With the layout
"huggingface" the weights carry Hugging Face's names and config.json stands beside them; that is written only after
Hugging Face's own forward was run on the folder and gave the same scores.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from smallbert.errors import RunError, UserError
from smallbert.machine.files import write_folder, write_json
from smallbert.model.anatomy import anatomy
from smallbert.model.batch import Batch
from smallbert.model.encoder import HEAD, Encoder, skeleton
from smallbert.model.modelfiles import load_tokenizer, quiet, read_json, read_tensors, save_tokenizer, write_tensors
from smallbert.model.words import find_word_head
from smallbert.model.zeros import sparse_linears

FORMAT = 1
AGAIN = "save or download the model again"
AUTO = {
    "classify": "AutoModelForSequenceClassification",
    "regress": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
    "answer": "AutoModelForQuestionAnswering",
    None: "AutoModel",
}
_KINDS = {"SequenceClassification": "classify", "TokenClassification": "tag", "QuestionAnswering": "answer"}


def save_folder(encoder: Encoder, path: Path | str) -> str:
    """Save an encoder whole or not at all; gives the layout, "huggingface" where that is true, else "smallbert"."""
    with write_folder(path) as aside:
        if encoder.tokenizer is not None:
            save_tokenizer(encoder, aside)
        layout = "huggingface" if _write_hugging_face(encoder, aside) else "smallbert"
        if layout == "smallbert":
            write_tensors(aside / "model.safetensors", _unique_tensors(encoder))
        describe(encoder, aside, layout)
    return layout


def describe(encoder: Encoder, folder: Path, layout: str) -> None:
    """Write down how the encoder was made, of which it can be made again but for its weights."""
    about = {"format": FORMAT, "layout": layout, "source": encoder.source}
    write_json(folder / "encoder.json", {**about, "config": encoder.base, "history": encoder.history})


def load_folder(path: Path | str) -> Encoder:
    """Load one of our folders or a Hugging Face folder; weights must fit to the last one."""
    path = Path(path)
    if (path / "encoder.json").is_file():
        return _load_ours(path)
    if (path / "config.json").is_file():
        return _load_hugging_face(path)
    raise UserError(f"{path} holds no model: neither encoder.json nor config.json is in it")


def _load_ours(path: Path) -> Encoder:
    saved = read_json(path / "encoder.json")
    encoder = _rebuild(path, saved)
    tensors = read_tensors(path / "model.safetensors")
    if saved["layout"] == "huggingface":
        back = {theirs: ours for ours, theirs in (_their_names(encoder) or {}).items()}
        tensors = {back.get(name, name): tensor for name, tensor in tensors.items()}
    expected = set(_unique_tensors(encoder))
    if expected != set(tensors):
        odd = sorted(expected ^ set(tensors))
        raise UserError(f"the weights in {path} do not fit its history: {len(odd)} names differ, first {odd[0]}")
    try:
        encoder.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise UserError(
            f"the weights in {path} do not fit its history: {str(error).splitlines()[-1].strip()}"
        ) from None
    for name, sparse in sparse_linears(encoder).items():
        if fault := sparse.fault():
            raise UserError(f"the weights in {path} do not fit its history: of {name}, {fault}; {AGAIN}")
    return encoder.eval()


def _rebuild(path: Path, saved: dict[str, Any]) -> Encoder:
    """The encoder that a folder's encoder.json tells of, with weights not yet set, or one sentence on what is wrong."""
    file, form = path / "encoder.json", saved.get("format", 0)
    if type(form) is not int or form < 1:
        raise UserError(f"{file} has no format that is a whole number from 1; {AGAIN}")
    if form > FORMAT:
        raise UserError(f"{path} was written by a newer smallbert (format {form}); upgrade smallbert to load it")
    if lost := [name for name in ("config", "history", "layout", "source") if name not in saved]:
        raise UserError(f"{file} has no {lost[0]}; {AGAIN}")
    tokenizer = load_tokenizer(path)
    try:
        encoder = skeleton(saved["config"], tokenizer)
        encoder.source = saved["source"]
        encoder.replay(saved["history"])
    except UserError as error:
        raise UserError(f"the recorded steps of {path} cannot be repeated: {str(error).splitlines()[0]}") from None
    except (MemoryError, OSError, RunError):
        raise
    except Exception as error:  # a damaged file can ask for anything; what it led to stays behind the sentence
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{file} describes a model that cannot be built ({why}); {AGAIN}") from error
    return encoder


def _load_hugging_face(path: Path) -> Encoder:
    config = read_json(path / "config.json")
    names = config.get("architectures") or ["?"]
    kind = next((kind for suffix, kind in _KINDS.items() if names[0].endswith(suffix)), None)
    if kind == "classify" and (config.get("problem_type") == "regression" or len(config.get("id2label") or "ab") == 1):
        kind = "regress"
    for file in sorted(path.glob("*.safetensors")):
        read_tensors(file, only_check=True)
    try:
        settings = {"dtype": torch.float32, "output_loading_info": True, "local_files_only": True}
        with quiet():
            model, info = auto_class(kind).from_pretrained(path, **settings)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{path} cannot be loaded as a model: {str(error).splitlines()[0]}") from None
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise UserError(f"the weights in {path} are not complete: {len(missing)} are missing, first {missing[0]}")
    backbone = model.base_model
    if any(name.startswith("pooler.") for name in info["missing_keys"]):
        backbone.pooler = None
    encoder = Encoder(backbone, load_tokenizer(path))
    encoder.source = path.name
    if kind is not None:
        _adopt_head(encoder, model, kind)
    else:
        encoder.spare = find_word_head(path, encoder.family)
    return encoder.eval()


def _adopt_head(encoder: Encoder, model: Any, kind: str) -> None:
    """Take over the head of a Hugging Face task model, labels and all."""
    from smallbert.methods.head import Head

    config = model.config
    labels = [] if kind in ("regress", "answer") else [config.id2label[number] for number in range(config.num_labels)]
    pool = getattr(config, "classifier_pooling", "cls")
    plan = {"kind": kind, "labels": labels, "outputs": config.num_labels, "from_pooler": encoder.pooler is not None}
    encoder.apply_method(Head(pool="mean" if pool == "mean" else "first"), plan)
    names = _their_names(encoder) or {}
    theirs, ours = model.state_dict(), encoder.state_dict()
    with torch.no_grad():
        for name, tensor in ours.items():
            if name.startswith("heads.") and names[name] in theirs:  # a pooler has moved here already
                tensor.copy_(theirs[names[name]])


def _write_hugging_face(encoder: Encoder, folder: Path) -> bool:
    """Write the folder as Hugging Face would, if its own forward then gives our scores."""
    from transformers import AutoConfig

    names = _their_names(encoder)
    if names is None:
        return False
    head = encoder.head if HEAD in encoder.heads else None
    kind = head.kind if head is not None else None
    auto = auto_class(kind)
    config = AutoConfig.for_model(**{k: v for k, v in encoder.backbone.config.to_dict().items()})
    config.architectures = [auto._model_mapping[type(config)].__name__]
    config.dtype = "float32"
    if head is not None:
        config.num_labels = head.out.out_features
        if head.labels:
            config.id2label = dict(enumerate(head.labels))
            config.label2id = {label: number for number, label in enumerate(head.labels)}
        if kind in ("regress", "classify"):
            config.problem_type = "regression" if kind == "regress" else "single_label_classification"
        if hasattr(config, "classifier_pooling"):
            config.classifier_pooling = "mean" if head.pool == "mean" else "cls"
    tensors = {names[name]: tensor for name, tensor in _unique_tensors(encoder).items()}
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in auto.from_config(config).state_dict().items()}
    if any(wanted.get(name) != tensor.shape for name, tensor in tensors.items()):
        return False
    config.save_pretrained(folder)
    write_tensors(folder / "model.safetensors", tensors)
    if _agrees(encoder, auto, folder):
        return True
    (folder / "config.json").unlink()
    return False


@torch.no_grad()
def _agrees(encoder: Encoder, auto: Any, folder: Path) -> bool:
    """Whether Hugging Face's forward on the folder gives what ours gives, on three random texts of unequal length."""
    try:
        with quiet():
            model, info = auto.from_pretrained(
                folder, output_loading_info=True, local_files_only=True, dtype=torch.float32
            )
    except (RuntimeError, ValueError, KeyError):
        return False
    if any(not name.startswith("pooler.") for name in info["missing_keys"]) or info["unexpected_keys"]:
        return False
    batch = probe_batch(encoder).to(encoder.device)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if anatomy(encoder.backbone).token_types:
        inputs["token_type_ids"] = batch.token_type_ids
    training = encoder.training
    encoder.eval()
    ours, theirs = encoder(batch), their_scores(encoder, model.to(encoder.device).eval()(**inputs))
    encoder.train(training)
    if ours.dim() == 3:
        real = batch.tokens()
        ours, theirs = ours[real], theirs[real]
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-4, rtol=1e-3)


def auto_class(kind: str | None) -> Any:
    """The class of transformers that reads models with a head of this kind, or with none."""
    import transformers

    return getattr(transformers, AUTO[kind])


def load_hugging_face(encoder: Encoder, folder: Path) -> Any:
    """The model of a folder that was written of an encoder, as transformers loads it."""
    auto = auto_class(encoder.head.kind if HEAD in encoder.heads else None)
    with quiet():
        return auto.from_pretrained(folder, local_files_only=True, dtype=torch.float32)


def their_scores(encoder: Encoder, result: Any) -> Tensor:
    """What Hugging Face's forward gives, in the shape of our scores."""
    if HEAD in encoder.heads and encoder.head.kind == "answer":
        return torch.stack([result.start_logits, result.end_logits], -1)
    return result.logits if HEAD in encoder.heads else result.last_hidden_state


def probe_batch(encoder: Encoder, lengths: tuple[int, ...] = (24, 9, 17)) -> Batch:
    """A few random texts of unequal length, the same every time, to compare two models on."""
    generator = torch.Generator().manual_seed(0)
    size, top = len(lengths), max(lengths)
    ids = torch.randint(5, encoder.backbone.config.vocab_size, (size, top), generator=generator)
    place = torch.arange(top).repeat(size, 1)
    length = torch.tensor(lengths)[:, None]
    mask = (place < length).long()
    pad = encoder.backbone.config.pad_token_id or 0
    types = ((place >= length // 2) & (place < length)).long()
    if getattr(encoder.backbone.config, "type_vocab_size", 2) < 2:
        types = torch.zeros_like(types)
    return Batch(ids.masked_fill(mask == 0, pad), types, place, attention_mask=mask, size=size, longest=top)


def _their_names(encoder: Encoder) -> dict[str, str] | None:
    """Our name of each weight -> Hugging Face's; None where something has no name there."""
    row, head = anatomy(encoder.backbone), (encoder.head if HEAD in encoder.heads else None)
    known = auto_class("classify")._model_mapping
    if encoder.mixture is not None or len(encoder.heads) > 1 or type(encoder.backbone.config) not in known:
        return None
    if head is not None and head.pool != "first" and encoder.family != "modernbert":
        return None
    prefix, out = "", ""
    if head is not None:
        auto = auto_class(head.kind)
        prefix = auto._model_mapping[type(encoder.backbone.config)].base_model_prefix + "."
        whole = head.kind in ("classify", "regress")
        spans = "classifier" if encoder.family == "modernbert" else "qa_outputs"
        out = row.classifier if whole else {"tag": "classifier", "answer": spans}[head.kind]
    renames = [
        (r"backbone\.", prefix),
        (rf"heads\.{HEAD}\.dense\.", row.dense + "."),
        (rf"heads\.{HEAD}\.norm\.", "head.norm."),
        (rf"heads\.{HEAD}\.out\.", out + "."),
        (r"pooler\.", f"{row.pooler}."),
    ]
    names = {}
    for name in encoder.state_dict():
        match = next(((pattern, new) for pattern, new in renames if re.match(pattern, name)), None)
        if match is None:
            return None
        names[name] = re.sub("^" + match[0], match[1], name)
    return names


def _unique_tensors(encoder: Encoder) -> dict[str, Tensor]:
    """The state, each tensor once: of tied ones the first name is kept, and replaying the history ties them again."""
    seen: dict[tuple[int, torch.Size], str] = {}
    unique = {}
    for name, tensor in encoder.state_dict().items():
        if seen.setdefault((tensor.data_ptr(), tensor.shape), name) == name or tensor.numel() == 0:
            unique[name] = tensor.detach().cpu().contiguous()
    return unique
