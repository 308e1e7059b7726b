"""ONNX files: tracing an encoder, making its graph lean, keeping few bits few, checking what came out."""
