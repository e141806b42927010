"""The checkpoint in fp32: as a decoder that writes texts, and with taps that show what its linear layers are given.

A tap is the input of a linear layer as a further output of the graph. Layers with the same input
share one: q, k and v are one layer, gate and up read the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Checkpoint
from specedge.export.decoder import write_decoder
from specedge.export.memory import release_memory
from specedge.models import Dimensions, find_family, read_dimensions
from specedge.quant.formats import HEAD
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import GraphNames as Names
from specedge.runtime.errors import StorageError
from specedge.runtime.graph import Decoder
from specedge.runtime.providers import open_session

if TYPE_CHECKING:
    import onnxruntime as ort
    from onnx import ModelProto

__all__ = ["CHUNK", "Reference", "Site", "Taps", "reference", "sites_of"]

Matrix = NDArray[np.float32]

CHUNK = 256
"""Most rows of a pass."""

_TAPPED = ".taps.onnx"


@dataclass(frozen=True)
class Site:
    """A place in a model where linear layers are given their input.

    Attributes:
        names: The layers that read it.
        layer: Which of the model's layers it is in; the number of layers for the head.
        width: Of its rows.
    """

    names: tuple[str, ...]
    layer: int
    width: int


@dataclass(frozen=True)
class Reference:
    """The checkpoint in fp32, on disk. One session at a time keeps the weights in memory once.

    Attributes:
        folder: Where the graph and its weights are; it must be writable.
        spec: The graph; its `file` is relative to `folder`.
        sites: Where its linear layers are given their inputs.
        threads: To compute with; None: all.
    """

    folder: Path
    spec: GraphSpec
    sites: tuple[Site, ...]
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.spec.precision != "fp32":
            raise ValueError(f"{self.spec.precision} is no reference")

    @contextmanager
    def decoder(self, capacity: int | None = None) -> Iterator[Decoder]:
        """The graph with a cache of `capacity` rows (None: all); freed at the end."""
        decoder = Decoder(self.folder / self.spec.file, self.spec, capacity=capacity, threads=self.threads)
        try:
            yield decoder
        finally:
            decoder.close()
            release_memory()

    @contextmanager
    def taps(self, capacity: int) -> Iterator[Taps]:
        """The graph with taps, for texts of fewer than `capacity` tokens; freed at the end."""
        path = self.folder / self.spec.file
        tapped = path.with_name(f".{path.stem}{_TAPPED}")
        model, outputs = _tapped(path, self.sites)
        try:
            tapped.write_bytes(model.SerializeToString())
            taps = Taps(open_session(tapped, threads=self.threads), self.spec, outputs, capacity)
        except OSError as error:
            raise StorageError(f"{tapped}: cannot be written ({error.strerror})") from None
        finally:
            tapped.unlink(missing_ok=True)
        try:
            yield taps
        finally:
            taps.close()
            release_memory()


@contextmanager
def reference(
    checkpoint: Checkpoint,
    capacity: int,
    *,
    written: tuple[Path, GraphSpec] | None = None,
    threads: int | None = None,
    on_tensor: Callable[[int], None] | None = None,
) -> Iterator[Reference]:
    """Writes a checkpoint in fp32 to a folder for temporary files.

    Args:
        checkpoint: The model.
        capacity: Most rows of a text.
        written: The folder and graph of an fp32 target of the same checkpoint and of at least this
            capacity, to be used instead.
        threads: To compute with; None: all.
        on_tensor: Told how many bytes were just written.

    Raises:
        SpecEdgeError: As `write_decoder`.
    """
    sites = sites_of(read_dimensions(find_family(checkpoint.config.get("model_type")), checkpoint.config))
    if written is not None and written[1].precision == "fp32" and written[1].capacity >= capacity:
        yield Reference(*written, sites, threads)
        return
    with TemporaryDirectory(prefix="specedge-") as name:
        folder = Path(name)
        spec = write_decoder(
            checkpoint, folder, stem="target", precision="fp32", capacity=capacity, on_tensor=on_tensor
        )
        yield Reference(folder, spec, sites, threads)


def sites_of(sizes: Dimensions) -> tuple[Site, ...]:
    """The sites of a model, in the order of computation."""
    found = []
    for layer in range(sizes.layers):
        for modules, width in (
            (("self_attn.qkv_proj",), sizes.hidden_size),
            (("self_attn.o_proj",), sizes.q_size),
            (("mlp.gate_proj", "mlp.up_proj"), sizes.hidden_size),
            (("mlp.down_proj",), sizes.mlp_size),
        ):
            found.append(Site(tuple(f"model.layers.{layer}.{module}" for module in modules), layer, width))
    return (*found, Site((HEAD,), sizes.layers, sizes.hidden_size))


class Taps:
    """A session of the graph with taps, and a cache of its own."""

    def __init__(
        self, session: ort.InferenceSession, spec: GraphSpec, outputs: Mapping[Site, str], capacity: int
    ) -> None:
        self._session = session
        self._spec = spec
        self._outputs = outputs
        self._cache = np.zeros((2 * spec.layers, 1, spec.kv_heads, capacity, spec.head_dim), spec.cache_dtype)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self._outputs)

    def run(self, tokens: Sequence[int], sites: Collection[Site]) -> Iterator[dict[Site, Matrix]]:
        """Runs a text in chunks, and shows the rows of some sites, [rows, width] each, chunk by chunk."""
        capacity = self._cache.shape[3]
        if len(tokens) >= capacity:
            raise ValueError(f"{len(tokens)} tokens do not fit into a cache of {capacity}, less one row")
        for start in range(0, len(tokens), CHUNK):
            yield self._pass(tokens[start : start + CHUNK], start, sites)

    def close(self) -> None:
        """Frees the session and the cache."""
        del self._session, self._cache

    def _pass(self, tokens: Sequence[int], start: int, sites: Collection[Site]) -> dict[Site, Matrix]:
        binding, rows, capacity = self._session.io_binding(), len(tokens), self._cache.shape[3]
        inputs: dict[str, NDArray[Any]] = {
            Names.INPUT_IDS: np.array([tokens], np.int64),
            Names.POSITION_IDS: np.arange(start, start + rows, dtype=np.int64)[None],
            Names.ATTENTION_BIAS: np.zeros((1, 1, rows, capacity), self._cache.dtype),
            Names.LAST_INDEX: np.array([start + rows - 1], np.int32),
            Names.TOTAL: np.array([capacity], np.int32),
            Names.LOGIT_ROWS: np.zeros(1, np.int64),
        }
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        deepest = max(site.layer for site in sites)
        for layer in range(self._spec.layers):
            for offset, kind in enumerate(("key", "value")):
                tensor = self._cache[2 * layer + offset]
                place = ("cpu", 0, tensor.dtype, tensor.shape, tensor.ctypes.data)
                binding.bind_input(Names.past(layer, kind), *place)
                if layer <= deepest:
                    binding.bind_output(Names.present(layer, kind), *place)
        wanted = [site for site in self._outputs if site in sites]
        taps = [np.empty((1, rows, site.width), np.float32) for site in wanted]
        for site, tap in zip(wanted, taps, strict=True):
            binding.bind_output(self._outputs[site], "cpu", 0, tap.dtype, tap.shape, tap.ctypes.data)
        self._session.run_with_iobinding(binding, _only_what_is_bound())
        return {site: tap[0] for site, tap in zip(wanted, taps, strict=True)}


def _only_what_is_bound() -> ort.RunOptions:
    """Layers behind the deepest wanted one are left out."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    return options


def _load(path: Path) -> ModelProto:
    import onnx

    return onnx.load_model(path, load_external_data=False)


def _tapped(path: Path, sites: Sequence[Site]) -> tuple[ModelProto, dict[Site, str]]:
    """The graph with an output for each site, and the outputs' names."""
    from onnx import TensorProto, helper

    model = _load(path)
    inputs = {node.input[1]: node.input[0] for node in model.graph.node if len(node.input) > 1}
    outputs = {}
    for site in sites:
        if site.names == (HEAD,):
            outputs[site] = Names.HIDDEN
            continue
        read = {inputs[f"{name}.weight"] for name in site.names}
        assert len(read) == 1  # layers of one site have one input
        outputs[site] = read.pop()
    for site, name in outputs.items():
        if name != Names.HIDDEN:
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "rows", site.width]))
    return model, outputs
