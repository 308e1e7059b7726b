"""What stands beside an ONNX file: how to run it with onnxruntime and tokenizers alone."""

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


def make_readme(about: dict[str, Any], title: str) -> str:
    """The page for an export."""
    kind = about["kind"]
    snippet = SNIPPET.format(texts=QUESTION if kind == "answer" else TEXTS, last=LAST[kind])
    size = f"{about['bytes'] / 1e6:,.1f} MB, {about['precision']}, at most {about['length']} tokens a text"
    checked = (
        f"Compared with the original on {about['checked']} texts: scores differ by {about['difference']:.1e} at most"
        + (f", {about['same']:.1%} of the predictions are the same" if about["same"] is not None else "")
        if about["checked"]
        else "Not compared with the original, since onnxruntime was not installed"
    )
    return PAGE.format(title=title, about="\n".join([f"{size}.", f"{checked}.", *about["notes"]]), snippet=snippet)
