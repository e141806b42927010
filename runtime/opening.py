"""Opens what a bundle holds: the target, draft models, heads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from specedge.runtime.bundle import MANIFEST, Bundle, GraphSpec, Manifest
from specedge.runtime.calibration import CALIBRATION, HeadCalibration, read_calibration
from specedge.runtime.contracts import Target
from specedge.runtime.errors import BundleError, DeviceError
from specedge.runtime.graph import Decoder
from specedge.runtime.growing import GrowingDecoder
from specedge.runtime.heads import HeadsGraph
from specedge.runtime.room import Room
from specedge.runtime.schema import one_line, parse_json

__all__ = ["Opener"]

_FLOATS = ("fp32", "fp16", "bf16")


class Opener:
    """Opens the graphs of one bundle, the target first.

    Args:
        bundle: The bundle.
        threads: Threads to compute with; None takes all processors of the process.
        capacity: Rows of cache to allocate; None: what the bundle was exported for.
        device: Where to run, whatever the bundle was made for; None: where it was made for.
        captured: Whether rounds are captured once and replayed, on CUDA.
        memory_budget: Most bytes that all models may take; None: what is free.

    Attributes:
        target: The model that verifies, with its cache.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int | None = None,
        capacity: int | None = None,
        device: str | None = None,
        captured: bool = True,
        memory_budget: int | None = None,
    ) -> None:
        self._bundle, self._threads, self._capacity = bundle, threads, capacity
        self._device, self._captured = device, captured
        self._room = Room(memory_budget)
        self.target: Target = self._decoder(self.manifest.target, capacity)

    @property
    def manifest(self) -> Manifest:
        return self._bundle.manifest

    @property
    def trees(self) -> bool:
        """Whether a token tree's rows are, but for a last bit, those of plain decoding.

        In a tree masked columns change the order in which a softmax sums. In floats that moves a logit by
        1e-5; where activations are rounded it moves them by whole steps, so that such a target gets chains.
        """
        return self.manifest.target.precision.startswith(_FLOATS)

    def draft(self, name: str) -> Target:
        """Opens a draft model; one that shares the target's cache works in it."""
        spec = self.manifest.drafts[name]
        if spec.shares_cache and isinstance(self.target, Decoder):
            return self._speculative(spec, None, host=self.target)
        # A draft model's context may end sooner; it then stops drafting.
        return self._decoder(spec, None if self._capacity is None else spec.rows_for(self._capacity))

    def heads(self, name: str) -> HeadsGraph:
        """Opens heads."""
        spec = self.manifest.heads[name]
        path, device = self._bundle.path(spec.file), self._device or self.manifest.device
        self._room.take(f"heads {name}", 2 * spec.weight_bytes, device)
        return HeadsGraph(path, spec, self.manifest.vocab_size, device=device, threads=self._threads)

    def calibration(self, name: str) -> HeadCalibration:
        """What was measured of heads.

        Raises:
            BundleError: It is missing, or does not fit the heads.
        """
        spec, found = self.manifest.heads[name], self._calibrations.get(name)
        shape = (spec.heads, {spec.guesses})
        if found is None or (len(found.top), {len(row) for row in found.top}) != shape:
            raise BundleError(f"{self._bundle.folder}/{CALIBRATION}: nothing that fits heads {name!r}; export it again")
        return found

    @cached_property
    def _calibrations(self) -> Mapping[str, HeadCalibration]:
        path = self._bundle.path(CALIBRATION)
        try:
            return read_calibration(parse_json(self._bundle.text(CALIBRATION)))
        except (ValueError, TypeError, RecursionError) as error:
            raise BundleError(f"{path}: {one_line(error)}, against {MANIFEST}; export the bundle again") from None

    def _decoder(self, spec: GraphSpec, capacity: int | None) -> Target:
        if not spec.tree:
            path, device = self._bundle.path(spec.file), self._device or self.manifest.device
            self._reserve(spec, capacity, device)
            return GrowingDecoder(path, spec, capacity=capacity, device=device, threads=self._threads)
        return self._speculative(spec, capacity)

    def _speculative(self, spec: GraphSpec, capacity: int | None, host: Decoder | None = None) -> Decoder:
        target = spec is self.manifest.target
        # Heads alone draft trees and read hidden rows; all others do without a mask, and so with faster kernels.
        drafts_trees = target and bool(self.manifest.heads)
        device = self._device or spec.device or self.manifest.device
        _check_device(spec, device)
        self._reserve(spec, 0 if host is not None else capacity, device)
        return Decoder(
            self._bundle.path(spec.file),
            spec,
            capacity=capacity,
            device=device,
            threads=self._threads,
            host=host,
            # A lone row goes through another kernel, which where activations are rounded matters as much as a tree.
            paired=target and not self.trees,
            masked=drafts_trees,
            hidden=drafts_trees,
            captured=self._captured,
        )

    def _reserve(self, spec: GraphSpec, capacity: int | None, device: str) -> None:
        """On a CPU weights count twice, mapped and prepacked; on a device what was mapped can be dropped."""
        rows = spec.capacity if capacity is None else min(capacity, spec.capacity)
        copies = 2 if device == "cpu" else 1
        self._room.take(spec.file, copies * spec.weight_bytes + spec.cache_bytes * rows // spec.capacity, device)


def _check_device(spec: GraphSpec, device: str) -> None:
    """What would silently run elsewhere, or not at all, is refused.

    Raises:
        DeviceError: The device has no kernel for the graph's attention.
    """
    if device == "tensorrt" and spec.flavour != "gqa" and not spec.fixed:
        raise DeviceError(f"{spec.file}: not made for TensorRT; export the model again with --device tensorrt")
    if spec.cache_dtype == "bfloat16" and device != "cuda":
        raise DeviceError(
            f"{spec.file}: bfloat16 runs on CUDA alone; export the model again with another --precision, as fp16, "
            f"for device {device}"
        )
    if spec.flavour == "gqa" and (device == "tensorrt" or (device == "cuda" and spec.cache_dtype == "float32")):
        what = "TensorRT does not know GroupQueryAttention" if device == "tensorrt" else "CUDA has none in fp32"
        raise DeviceError(f"{spec.file}: {what}; export the model again with --device {device}")
