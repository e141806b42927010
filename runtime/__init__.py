"""Everything the device runs: numpy, ONNX Runtime and tokenizers, no torch."""
