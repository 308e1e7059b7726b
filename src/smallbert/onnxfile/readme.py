"""What stands beside an exported model: how to run it, an ONNX file with onnxruntime and tokenizers alone."""

from __future__ import annotations

from typing import Any

from smallbert.tasks.answers import LONGEST_ANSWER

PAGE = """# {title}

{about}

It needs no torch and no smallbert: `pip install onnxruntime tokenizers numpy`, then, in this folder:

```python
{snippet}
```

`smallbert serve` serves this folder over HTTP, `smallbert bench` measures its speed.
"""
OPEN = """import json
import numpy, onnxruntime, tokenizers

about = json.load(open("export.json"))
session = onnxruntime.InferenceSession("model.onnx")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
tokenizer.enable_padding(pad_id=about["pad"])"""
CUT = 'tokenizer.enable_truncation(about["length"])'
TEXTS = 'texts = ["a lovely film", "a dull one, but short"]  # a pair: ("one text", "another")'
WORDS = 'texts = ["a lovely film".split(), "a dull one, but short".split()]'
QUESTION = 'question, context = "Who came?", "The old man came late."'
READ_TEXTS = f"{CUT}\n{TEXTS}\nfound = tokenizer.encode_batch(texts)"
READ = {
    "classify": READ_TEXTS,
    "regress": READ_TEXTS,
    "tag": f"{CUT}\n{WORDS}\nfound = tokenizer.encode_batch(texts, is_pretokenized=True)",
    "answer": f"""tokenizer.enable_truncation(about["length"], stride=about["length"] // 4, strategy="only_second")
{QUESTION}
found = [one := tokenizer.encode(question, context), *one.overflowing]  # a long context is read in parts""",
    None: READ_TEXTS,
}
RUN = """columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
inputs = {name: numpy.array([getattr(one, columns[name]) for one in found]) for name in about["inputs"]}
scores = session.run(None, inputs)[0]"""
ANSWER = f"""inside = numpy.array([one.sequence_ids for one in found]) == 1  # the tokens of the context
spans = numpy.tril(numpy.triu(inside[:, :, None] & inside[:, None]), {LONGEST_ANSWER - 1})  # <= {LONGEST_ANSWER} tokens
sums = numpy.where(spans, scores[:, :, None, 0] + scores[:, None, :, 1], -numpy.inf)
part, start, end = numpy.unravel_index(sums.argmax(), sums.shape)
places = found[part].offsets
print(context[places[start][0] : places[end][1]].strip())"""
TELL = {
    "classify": 'print([about["labels"][row.argmax()] for row in scores])',
    "regress": "print(scores[:, 0])",
    "tag": """for words, one, row in zip(texts, found, scores):
    tokens = [one.word_to_tokens(number) for number in range(len(words))]  # the first one has the word's label
    print([(word, about["labels"][row[own[0]].argmax()]) for word, own in zip(words, tokens) if own])""",
    "answer": ANSWER,
    None: "print(scores[:, 0])  # the hidden state of each text's first token",
}
PLAIN = """# {title}

{about}

A plain Hugging Face folder: `pip install transformers torch`, then, in this folder:

```python
{first}from transformers import AutoTokenizer, {loader}

tokenizer, model = AutoTokenizer.from_pretrained("."), {loader}.from_pretrained(".")
limits = {{"padding": True, "max_length": {length}, "return_tensors": "pt"}}
{tell}
```
"""
READ_PLAIN = f"{TEXTS}\nfound = model(**tokenizer(texts, truncation=True, **limits))"
LOADERS = {
    "classify": "AutoModelForSequenceClassification",
    "regress": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
    "answer": "AutoModelForQuestionAnswering",
    None: "AutoModel",
}
TELL_PLAIN = {
    "classify": f"{READ_PLAIN}\nprint([model.config.id2label[one] for one in found.logits.argmax(-1).tolist()])",
    "regress": f"{READ_PLAIN}\nprint(found.logits[:, 0].tolist())",
    "tag": f"""{WORDS}
inputs = tokenizer(texts, is_split_into_words=True, truncation=True, **limits)
for number, (words, tags) in enumerate(zip(texts, model(**inputs).logits.argmax(-1).tolist())):
    tokens = [inputs.word_to_tokens(number, word) for word in range(len(words))]  # the first one has the word's label
    print([(word, model.config.id2label[tags[own.start]]) for word, own in zip(words, tokens) if own])""",
    "answer": f"""{QUESTION}
parts = {{"stride": limits["max_length"] // 4, "return_overflowing_tokens": True}}  # a long context is read in parts
inputs = tokenizer(question, context, truncation="only_second", **limits, **parts)
inputs.pop("overflow_to_sample_mapping")
found, given = inputs.encodings, model(**inputs)
scores = numpy.stack([given.start_logits.detach(), given.end_logits.detach()], -1)
{ANSWER}""",
    None: f"{READ_PLAIN}\nprint(found.last_hidden_state[:, 0])",
}


def make_plain_readme(about: dict[str, Any], kind: str | None, title: str) -> str:
    """The page for a plain Hugging Face folder."""
    size = f"{about['bytes'] / 1e6:,.1f} MB. {_compared(about)}."
    facts = {"loader": LOADERS[kind], "length": about["length"], "tell": TELL_PLAIN[kind]}
    return PLAIN.format(title=title, about=size, first="import numpy\n" if kind == "answer" else "", **facts)


def make_readme(about: dict[str, Any], title: str) -> str:
    """The page for an ONNX file."""
    kind = about["kind"]
    snippet = "\n".join([OPEN, READ[kind], RUN, TELL[kind]])
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
