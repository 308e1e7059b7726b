"""A model as a small HTTP server: an ONNX export, its tokenizer and onnxruntime; torch is never imported here.

run.py        the process: socket, signals, shutdown
app.py        routes, limits, what is answered when something is wrong
requests.py   bodies -> rows
kinds.py      rows -> tokens, scores -> predictions, for each kind of head
model.py      tokenizer, session, labels; loading.py reads them from an export folder
batching.py   texts of many requests, scored together
metrics.py    what /metrics says
"""
