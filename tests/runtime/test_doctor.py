"""The doctor on machines that are described, not there: what it finds, and what it says to do."""

from __future__ import annotations

import dataclasses
import json

import pytest

from specedge.runtime import machine
from specedge.runtime.doctor import Report, advise, examine, graph_placements, report_json, report_table
from specedge.runtime.machine import GPU, Machine, look_at_machine

ORIN = GPU("Orin", "8.7", 7_600_000_000, True, 102e9, "12.6")
DESKTOP = GPU("NVIDIA RTX", "8.9", 16_000_000_000, False, 500e9, "13.0")
NANO = Machine("Linux aarch64", "NVIDIA Jetson Orin Nano", "36.4.3", "MAXN_SUPER", ORIN)
CPU_ONLY, CUDA = ("CPUExecutionProvider",), ("CUDAExecutionProvider", "CPUExecutionProvider")


def report(machine, providers=CUDA, **packages):
    given = packages or {"onnxruntime_gpu": "1.31.1"}
    named = {name.replace("_", "-"): version for name, version in given.items()}
    return Report("3.11.1", named, providers, 6, 6_000_000_000, None, machine)


def said(*given, **packages):
    return "\n".join(f"{each.level}: {each.text}" for each in advise(report(*given, **packages)))


def test_a_machine_without_a_gpu_is_well():
    plain = Machine("Linux x86_64", "", "", "", None)
    assert said(plain, CPU_ONLY, onnxruntime="1.32.0") == (
        "ok: no GPU of NVIDIA's was found: bundles of --device cpu run here"
    )
    assert "todo: ONNX Runtime is not installed: pip install 'specedge[cpu]'" in said(plain, (), numpy="2.0")


def test_a_desktop_gpu_with_the_wheel_for_cpus():
    desktop = Machine("Linux x86_64", "", "", "", DESKTOP)
    found = said(desktop, CPU_ONLY, onnxruntime="1.32.0")
    assert "NVIDIA RTX is there and this ONNX Runtime has no provider for it: pip uninstall onnxruntime; pip" in found
    both = said(desktop, CUDA, onnxruntime="1.32.0", onnxruntime_gpu="1.31.1")
    assert "both installed and overwrite each other" in both
    assert said(desktop) == "ok: specedge export MODEL --device cuda"


def test_jetpack_6_gets_its_own_wheel():
    found = said(NANO, CPU_ONLY, onnxruntime="1.23.2")
    assert "https://pypi.jetson-ai-lab.io/jp6/cu126 onnxruntime-gpu==1.23.0" in found
    assert "PyPI's wheel for aarch64 has no kernels for Orin" in found
    assert "shares the system's memory" in found


def test_the_export_follows_the_version():
    tensorrt = ("TensorrtExecutionProvider", *CUDA)
    old = said(NANO, tensorrt, onnxruntime_gpu="1.23.0")
    assert "--device cuda --attention plain" in old
    assert "--device tensorrt --attention plain (TensorRT 10.3)" in old
    assert "--attention onnx24" in said(NANO, CUDA, onnxruntime_gpu="1.28.0")


def test_a_wheel_that_may_lack_the_gpus_kernels():
    public = dataclasses.replace(report(NANO), wheel="manylinux_2_34_aarch64")
    own = dataclasses.replace(public, wheel="linux_aarch64")
    server = dataclasses.replace(
        public, machine=dataclasses.replace(NANO, gpu=dataclasses.replace(ORIN, capability="9.0"))
    )
    found = [" ".join(each.text for each in advise(one)) for one in (public, own, server)]
    assert ["no kernels for compute capability" in text for text in found] == [True, False, False]


def test_a_power_mode_that_is_not_the_fastest():
    slow = dataclasses.replace(NANO, power="15W", fastest="2 (MAXN_SUPER)")
    found = said(slow, CUDA, onnxruntime_gpu="1.24.0")
    assert "note: power mode 15W: mode 2 (MAXN_SUPER) is faster: sudo nvpmodel -m 2; sudo jetson_clocks" in found
    assert "nvpmodel" not in said(NANO, CUDA, onnxruntime_gpu="1.24.0")


def test_a_runtime_that_cannot_be_loaded():
    broken = dataclasses.replace(report(NANO, ()), broken="onnxruntime cannot be loaded: libcublas.so.12: cannot open")
    found = [each.text for each in advise(broken)]
    assert "ONNX Runtime is installed and cannot be loaded: onnxruntime cannot be loaded: libcublas" in found[0]
    assert not any("specedge[cpu]" in text for text in found)


@pytest.mark.parametrize(("release", "jetpack"), [("35", 5), ("36", 6), ("38", 7), ("39", 7), ("99", None)])
def test_what_a_boards_files_say(tmp_path, monkeypatch, release, jetpack):
    monkeypatch.setattr(machine, "_LIBRARIES", ())
    for name, text in {
        "etc/nv_tegra_release": f"# R{release} (release), REVISION: 4.3, GCID: 38968081, BOARD: generic",
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano\0",
        "var/lib/nvpmodel/status": "pmode:0001 fmode:fanNull\n",
        "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n"
        "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = look_at_machine(tmp_path)
    assert (found.board, found.l4t, found.jetpack) == ("NVIDIA Jetson Orin Nano", f"{release}.4.3", jetpack)
    assert (found.power, found.fastest) == ("25W", "2 (MAXN_SUPER)")
    assert found.gpu is None


class Driver:
    """libcuda as ctypes sees it."""

    def __init__(self, broken=0):
        self.broken = broken

    def cuInit(self, flags):  # noqa: N802  the driver's names
        return self.broken

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = 12060

    def cuDeviceGet(self, device, number):  # noqa: N802
        return 0

    def cuDeviceGetAttribute(self, value, which, device):  # noqa: N802
        value._obj.value = {75: 8, 76: 7, 18: 1, 36: 3_199_000, 37: 128}[which]

    def cuDeviceGetName(self, name, length, device):  # noqa: N802
        name.value = b"Orin"

    def cuDeviceTotalMem_v2(self, size, device):  # noqa: N802
        size._obj.value = 7_600_000_000


def test_the_driver_is_asked(monkeypatch):
    monkeypatch.setattr(machine, "_load", lambda name: Driver())
    found = machine.look_at_gpu.__wrapped__()
    assert found == GPU("Orin", "8.7", 7_600_000_000, True, 2e3 * 3_199_000 * 16, "12.6")
    monkeypatch.setattr(machine, "_load", lambda name: Driver(broken=100))
    assert machine.look_at_gpu.__wrapped__() is None


def test_this_machine():
    found = examine()
    assert json.loads(json.dumps(report_json(found)))["python"] == found.python
    assert found.advice
    from specedge.runtime.show import show

    class Out:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

        def isatty(self):
            return False

    out = Out()
    show(report_table(found), out)
    assert "specedge doctor" in out.text and "gpu" in out.text


def test_where_the_nodes_of_a_bundle_land(tiny_bundle):
    pytest.importorskip("onnxruntime")
    found = graph_placements(tiny_bundle)
    assert set(found) == {"onnx/target.onnx", "drafts/self-int4/draft.onnx", "drafts/self-int8/draft.onnx"}
    assert all("nodes on CPUExecutionProvider" in text or "does not say" in text for text in found.values())
