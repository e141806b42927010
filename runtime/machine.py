"""What this machine is, as far as it can be told without any package: GPU, board, JetPack, power mode.

The driver is asked itself (libcuda, through ctypes): it is there wherever a CUDA program can run, which the
tools that print the same are not. Nothing is changed, and no file is written.
"""

from __future__ import annotations

import ctypes
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["GPU", "Machine", "look_at_gpu", "look_at_machine"]

_MAJOR, _MINOR, _INTEGRATED, _CLOCK, _BUS = 75, 76, 18, 36, 37  # CUdevice_attribute, cuda.h
_NAME_LENGTH = 96
_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
_MODE = re.compile(r"pmode:(\d+)")
_MODES = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>")
_RELEASE = re.compile(r"R(\d+) \(release\), REVISION: ([\d.]+)")


@dataclass(frozen=True)
class GPU:
    """The first GPU of the driver's.

    Attributes:
        name: As the driver calls it.
        capability: Compute capability, "8.7".
        memory_bytes: Its memory; of an integrated one, the system's.
        integrated: Whether it shares the system's memory.
        bandwidth: Of its memory, bytes a second, from clock and bus width; 0: the driver does not say.
        driver: The newest version of CUDA that the driver runs, "12.6".
    """

    name: str
    capability: str
    memory_bytes: int
    integrated: bool
    bandwidth: float
    driver: str


@dataclass(frozen=True)
class Machine:
    """What was found; "" or None where there is nothing.

    Attributes:
        system: Operating system and processor: "Linux x86_64".
        board: Name of the board, where firmware gives one.
        l4t: Version of Jetson Linux: "36.4.3".
        power: Name of the power mode in force, as the board's own tool keeps it; its number where it has no name.
        fastest: Number and name of the mode that limits nothing; "": the board has none, or it is in force.
        gpu: The first GPU.
    """

    system: str
    board: str
    l4t: str
    power: str
    gpu: GPU | None
    fastest: str = ""

    @property
    def jetpack(self) -> int | None:
        """Main version of JetPack: Jetson Linux 35 is JetPack 5, 36 is 6, 38 and 39 are 7."""
        major = self.l4t.partition(".")[0]
        return {"35": 5, "36": 6, "38": 7, "39": 7}.get(major)


def look_at_machine(root: Path = Path("/")) -> Machine:
    """Looks.

    Args:
        root: Where the system's files are.
    """
    found = _RELEASE.search(_text(root / "etc/nv_tegra_release"))
    power, fastest = _power(_text(root / "var/lib/nvpmodel/status"), _text(root / "etc/nvpmodel.conf"))
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        board=_text(root / "proc/device-tree/model").rstrip("\0\n"),
        l4t=f"{found[1]}.{found[2]}" if found else "",
        power=power,
        gpu=look_at_gpu(),
        fastest=fastest,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _power(status: str, modes: str) -> tuple[str, str]:
    """The mode in force, and a faster one; from "pmode:0001 fmode:fanNull" and the board's table of modes."""
    now = _MODE.search(status)
    if now is None:
        return "", ""
    names = {int(number): name for number, name in _MODES.findall(modes)}
    power = names.get(int(now[1]), str(int(now[1])))
    unlimited = [number for number, name in names.items() if name.startswith("MAXN")]
    best = max(unlimited, key=lambda number: len(names[number]), default=None)  # MAXN_SUPER is above MAXN
    return power, "" if best is None or names[best] == power else f"{best} ({names[best]})"


@cache
def look_at_gpu() -> GPU | None:
    """The first GPU; None where there is no driver, or it knows none."""
    library = next(filter(None, map(_load, _LIBRARIES)), None)
    if library is None or library.cuInit(0):
        return None
    version, device = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    if library.cuDeviceGet(ctypes.byref(device), 0):
        return None

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    name, memory = ctypes.create_string_buffer(_NAME_LENGTH), ctypes.c_size_t()
    library.cuDeviceGetName(name, _NAME_LENGTH, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    return GPU(
        name=name.value.decode("utf-8", "replace"),
        capability=f"{attribute(_MAJOR)}.{attribute(_MINOR)}",
        memory_bytes=memory.value,
        integrated=bool(attribute(_INTEGRATED)),
        bandwidth=2e3 * attribute(_CLOCK) * attribute(_BUS) / 8,  # kHz, twice a clock; bits
        driver=f"{version.value // 1000}.{version.value % 1000 // 10}",
    )


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
