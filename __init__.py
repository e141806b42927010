"""SpecEdge: exact speculative decoding for language models on edge devices."""

__version__ = "0.1.0"
