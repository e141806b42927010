"""RMS norms: one fused operator of ONNX Runtime's, or standard arithmetic that every compiler knows."""

from __future__ import annotations

from specedge.export.nodes import MICROSOFT, GraphBuilder

__all__ = ["add_and_norm", "rms_norm"]


def rms_norm(graph: GraphBuilder, x: str, weight: str, eps: float, label: str | None = None) -> str:
    """Adds x / sqrt(mean(x^2) + eps) * weight over the last axis, the mean in fp32; returns its name.

    Root mean square layer normalisation (Zhang and Sennrich 2019, arXiv:1910.07467).
    """
    if graph.dialect.contrib:
        return graph.op("SimplifiedLayerNormalization", x, weight, name=label, axis=-1, epsilon=eps, stash_type=1)
    half = graph.dtype != "float32"
    wide = graph.cast(x, "float32") if half else x
    mean = graph.op("ReduceMean", graph.op("Mul", wide, wide), graph.integers(-1), keepdims=1)
    root = graph.op("Sqrt", graph.op("Add", mean, graph.number(eps, "float32")))
    unit = graph.op("Div", wide, root)
    return graph.op("Mul", graph.cast(unit, graph.dtype) if half else unit, weight, name=label)


def add_and_norm(graph: GraphBuilder, x: str, residual: str, weight: str, eps: float, label: str) -> tuple[str, str]:
    """Adds x to the residual and norms the sum; returns both, the norm under the name `label`."""
    total = f"{label}.residual"
    if graph.dialect.contrib:
        inputs, outputs = (x, residual, weight), (label, "", "", total)
        graph.ops("SkipSimplifiedLayerNormalization", inputs, outputs, domain=MICROSOFT, epsilon=eps)
        return label, total
    graph.op("Add", x, residual, name=total)
    return rms_norm(graph, total, weight, eps, label), total
