"""Predicts a device from its datasheet: the roofline of a pass, and from it the speed of every method.

A pass of w rows reads the weights and the cache once and computes 2 * parameters * w operations:

    memory = (weights + past * kv bytes a token) / bandwidth,    compute = 2 * parameters * w / peak,
    pass(w) = max(memory, compute) + (1 - overlap) * min(memory, compute) + kernels * launch

(Williams, Waterman and Patterson, The roofline model, 2009). GPUs load while they compute (overlap 1);
a processor whose cores do both in turn does not (overlap 0). What comes out is a prediction: it knows
neither kernels that fall short of the roof, nor a device that grows hot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specedge.runtime.errors import UsageError
from specedge.runtime.options import PLAIN
from specedge.runtime.schema import fields_of, one_line, parse_json

__all__ = [
    "MODELS",
    "DeviceProfile",
    "Model",
    "Prediction",
    "loaded_bytes",
    "pass_ms",
    "predict",
    "profile_names",
    "read_profile",
]

_FOLDER = Path(__file__).with_name("profiles")
_MOST_BYTES = 1 << 16
_LONGEST = 16
_BITS = {"fp32": 32.0, "fp16": 16.0, "int8": 8.25, "int8-block": 8.5, "int4": 4.5}
"""Bits of a weight, scales included."""


@dataclass(frozen=True)
class DeviceProfile:
    """A device's numbers.

    Attributes:
        name: What it is called.
        bandwidth_gbs: Memory bandwidth, 1e9 bytes a second.
        tflops: Peak of the products, 1e12 operations a second, dense, by precision of the weights.
        launch_us: Microseconds to start a kernel.
        overlap: 1: loads while it computes; 0: in turn.
        memory_gb: Memory that a model can have; 0: not known.
        efficiency: Share of the bandwidth that a pass reaches.
        source: Where the numbers come from.
    """

    name: str
    bandwidth_gbs: float
    tflops: Mapping[str, float]
    launch_us: float
    overlap: float = 1.0
    memory_gb: float = 0.0
    efficiency: float = 0.8
    source: str = ""

    def __post_init__(self) -> None:
        numbers = {"bandwidth_gbs": self.bandwidth_gbs, **{f"tflops {key}": each for key, each in self.tflops.items()}}
        for name, value in numbers.items():
            if not 1e-3 <= value <= 1e6:
                raise ValueError(f"{name} is {value}")
        if (
            not self.tflops
            or not 0 <= self.overlap <= 1
            or not 0.01 <= self.efficiency <= 1
            or not 0 <= self.launch_us < 1e6
        ):
            raise ValueError("tflops, overlap (0 to 1), efficiency (0 to 1) or launch_us out of range")


@dataclass(frozen=True)
class Model:
    """What of a model matters for time.

    Attributes:
        name: What it is called.
        parameters: Of all products, the vocabulary's included.
        layers: Its layers.
        kv_width: Keys a layer and token: kv_heads * head_dim.
        kernels: Kernels that a layer starts.
    """

    name: str
    parameters: float
    layers: int
    kv_width: int
    kernels: int = 9


MODELS = (
    Model("1B (Llama 3.2)", 1.24e9, 16, 512),
    Model("3B (Llama 3.2)", 3.21e9, 28, 1024),
    Model("8B (Llama 3.1)", 8.03e9, 32, 1024),
)
"""Public models of the sizes that boards run."""


@dataclass(frozen=True)
class Prediction:
    """What a method is predicted to do.

    Attributes:
        method: Its name.
        draft_length: At which it is fastest.
        ms_per_token: Milliseconds a committed token there.
        tau: Tokens a pass.
    """

    method: str
    draft_length: int
    ms_per_token: float
    tau: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 / self.ms_per_token


def pass_ms(model: Model, precision: str, device: DeviceProfile, rows: int, past: int = 256) -> float:
    """Milliseconds of a pass.

    Raises:
        UsageError: A precision that nothing is known of.
    """
    memory = loaded_bytes(model, precision, past) / (device.bandwidth_gbs * 1e9 * device.efficiency)
    peak = device.tflops.get(precision, device.tflops.get("fp16", min(device.tflops.values())))
    compute = 2 * model.parameters * rows / (peak * 1e12)
    busy = max(memory, compute) + (1 - device.overlap) * min(memory, compute)
    return 1e3 * busy + 1e-3 * device.launch_us * model.kernels * model.layers


def loaded_bytes(model: Model, precision: str, past: int = 256) -> float:
    """Bytes that a pass loads: the weights, and keys and values of `past` tokens.

    Raises:
        UsageError: A precision that nothing is known of.
    """
    if precision not in _BITS:
        raise UsageError(f"precision {precision!r} cannot be predicted; choose one of {', '.join(_BITS)}")
    size = 4 if precision == "fp32" else 2
    return model.parameters * _BITS[precision] / 8 + 2 * model.layers * model.kv_width * past * size


def predict(
    model: Model,
    precision: str,
    device: DeviceProfile,
    gains: Mapping[str, Sequence[float]],
    drafts: Mapping[str, tuple[float, float]],
    *,
    past: int = 256,
    host_ms: float = 0.2,
) -> list[Prediction]:
    """Every method at the draft length at which it is fastest, plain decoding first.

    Args:
        model, precision, device: What runs where.
        gains: For each method the expected accepted tokens of drafts of 0, 1, 2 … tokens.
        drafts: For each method milliseconds of a draft, and of each of its tokens.
        past: Tokens in the cache.
        host_ms: What a round takes beside.
    """
    passes = [pass_ms(model, precision, device, rows, past) for rows in range(1, _LONGEST + 2)]
    found = [Prediction(PLAIN, 0, passes[0] + host_ms, 1.0)]
    for method, expected in gains.items():
        whole, each = drafts[method]
        rates = [
            ((whole + each * n + passes[n] + host_ms) / (1 + expected[n]), n)
            for n in range(1, min(len(expected), len(passes)))
        ]
        if rates:
            ms, n = min(rates)
            found.append(Prediction(method, n, ms, 1 + expected[n]))
    return found


def profile_names() -> tuple[str, ...]:
    """Devices whose numbers are known."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def read_profile(name: str) -> DeviceProfile:
    """A device's profile, by its name or from a file.

    Raises:
        UsageError: There is none, or it is none.
    """
    path = _FOLDER / f"{name}.json" if name in profile_names() else Path(name)
    try:
        if not path.is_file():
            raise FileNotFoundError
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("larger than a profile can be")
        values = fields_of(DeviceProfile, parse_json(path.read_text(encoding="utf-8")), "the profile")
        values["tflops"] = {str(key): float(each) for key, each in dict(values["tflops"]).items()}
        for number in ("bandwidth_gbs", "launch_us", "overlap", "memory_gb", "efficiency"):
            values[number] = float(values[number])
        return DeviceProfile(**values)
    except OSError:
        raise UsageError(
            f"{name}: no device profile of this name and no such file; the names are {', '.join(profile_names())}, this"
        ) from None
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise UsageError(f"{path}: no device profile ({one_line(error)}); see docs/tuning.md") from None
