"""What stands beside an exported model: how to run it, an ONNX file with onnxruntime and tokenizers alone."""

from __future__ import annotations

from typing import Any

PAGE = """# {title}

{about}

It needs no torch and no smallbert: `pip install onnxruntime tokenizers numpy`, then, in this folder:

```python
{snippet}
```

`smallbert serve` on this folder answers over HTTP, `smallbert bench` says how fast it is.
"""
SNIPPET = """import json
import numpy, onnxruntime, tokenizers

about = json.load(open("export.json"))
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
tokenizer.enable_truncation(about["length"])
tokenizer.enable_padding(pad_id=about["pad"])
session = onnxruntime.InferenceSession("model.onnx")
found = tokenizer.encode_batch({texts})
columns = {{"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}}
inputs = {{name: numpy.array([getattr(one, columns[name]) for one in found]) for name in about["inputs"]}}
scores = session.run(None, inputs)[0]
{last}"""
TEXTS = '["a lovely film", "a dull one, but short"]'
QUESTION = '[("who came?", "the old man came late")]'
LAST = {
    "classify": 'print([about["labels"][row.argmax()] for row in scores])',
    "regress": "print(scores[:, 0])",
    "tag": 'print([[about["labels"][tag] for tag in row.argmax(-1)] for row in scores])',
    "answer": "print([(one.tokens[row[:, 0].argmax() : row[:, 1].argmax() + 1]) for one, row in zip(found, scores)])",
    None: "print(scores[:, 0])  # the hidden state of each text's first token",
}
PLAIN = """# {title}

{about}

A plain Hugging Face folder: `pip install transformers torch`, then, in this folder:

```python
from transformers import AutoTokenizer, {loader}

tokenizer, model = AutoTokenizer.from_pretrained("."), {loader}.from_pretrained(".")
inputs = tokenizer({texts}, padding=True, truncation=True, return_tensors="pt")
found = model(**inputs)
print({last})
```
"""
LOADERS = {
    "classify": (
        "AutoModelForSequenceClassification",
        "[model.config.id2label[one] for one in found.logits.argmax(-1).tolist()]",
    ),
    "regress": ("AutoModelForSequenceClassification", "found.logits[:, 0].tolist()"),
    "tag": (
        "AutoModelForTokenClassification",
        "[[model.config.id2label[tag] for tag in row] for row in found.logits.argmax(-1).tolist()]",
    ),
    "answer": (
        "AutoModelForQuestionAnswering",
        'tokenizer.decode(inputs["input_ids"][0, found.start_logits.argmax() : found.end_logits.argmax() + 1])',
    ),
    None: ("AutoModel", "found.last_hidden_state[:, 0]"),
}


def make_plain_readme(about: dict[str, Any], kind: str | None, title: str) -> str:
    """The page for a plain Hugging Face folder."""
    loader, last = LOADERS[kind]
    asked = '["who came?"], ["the old man came late"]' if kind == "answer" else TEXTS
    size = f"{about['bytes'] / 1e6:,.1f} MB. {_compared(about)}."
    return PLAIN.format(title=title, about=size, loader=loader, texts=asked, last=last)


def make_readme(about: dict[str, Any], title: str) -> str:
    """The page for an ONNX file."""
    kind = about["kind"]
    snippet = SNIPPET.format(texts=QUESTION if kind == "answer" else TEXTS, last=LAST[kind])
    size = f"{about['bytes'] / 1e6:,.1f} MB, {about['precision']}, at most {about['length']} tokens a text"
    said = "\n".join([f"{size}.", f"{_compared(about)}.", *about["notes"]])
    return PAGE.format(title=title, about=said, snippet=snippet)


def _compared(about: dict[str, Any]) -> str:
    """How near it is to the original."""
    if not about["checked"]:
        return "Not compared with the original, since onnxruntime was not installed"
    same = f", {about['same']:.1%} of the predictions are the same" if about["same"] is not None else ""
    far = f"scores differ by {about['difference']:.1e} at most{same}"
    return f"Compared with the original on {about['checked']} texts: {far}"
