"""Opens what a bundle holds: the target, draft models, heads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from specedge.runtime.bundle import MANIFEST, Bundle, GraphSpec, Manifest
from specedge.runtime.calibration import CALIBRATION, HeadCalibration, read_calibration
from specedge.runtime.contracts import Target
from specedge.runtime.errors import BundleError
from specedge.runtime.graph import Decoder
from specedge.runtime.growing import GrowingDecoder
from specedge.runtime.heads import HeadsGraph
from specedge.runtime.schema import one_line, parse_json

__all__ = ["Opener"]

_FLOATS = ("fp32", "fp16")


class Opener:
    """Opens the graphs of one bundle, the target first.

    Args:
        bundle: The bundle.
        threads: Threads to compute with; None takes all processors of the process.
        capacity: Rows of cache to allocate; None: what the bundle was exported for.

    Attributes:
        target: The model that verifies, with its cache.
    """

    def __init__(self, bundle: Bundle, *, threads: int | None = None, capacity: int | None = None) -> None:
        self._bundle, self._threads, self._capacity = bundle, threads, capacity
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
            path = self._bundle.path(spec.file)
            return Decoder(path, spec, device=self.manifest.device, threads=self._threads, host=self.target)
        # A draft model's context may end sooner; it then stops drafting.
        return self._decoder(spec, None if self._capacity is None else min(self._capacity, spec.capacity))

    def heads(self, name: str) -> HeadsGraph:
        """Opens heads."""
        spec, device = self.manifest.heads[name], self.manifest.device
        path = self._bundle.path(spec.file)
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
        path, device = self._bundle.path(spec.file), self.manifest.device
        if not spec.tree:
            return GrowingDecoder(path, spec, capacity=capacity, device=device, threads=self._threads)
        # A lone row goes through another kernel, which where activations are rounded matters as much as a tree.
        paired = spec is self.manifest.target and not self.trees
        return Decoder(path, spec, capacity=capacity, device=device, threads=self._threads, paired=paired)
