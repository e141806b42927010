"""What is told to a GPU's providers, where nodes land, whether a model fits: all that can be shown without a GPU."""

from __future__ import annotations

import dataclasses
import shutil
import types

import pytest

from specedge.runtime import placement, providers, room
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.errors import DeviceError, MemoryBudgetError, UsageError
from specedge.runtime.options import Options
from specedge.runtime.placement import placement_of, strays
from specedge.runtime.provider_options import context_file, cuda_options, engine_folder, profiles, tensorrt_options
from specedge.runtime.room import Room, available_memory

GQA = GraphSpec("onnx/target.onnx", "gqa", "fp16", 2, 2, 16, 64, 160, 1024, "float16", 0)
ONNX24 = GraphSpec("onnx/target.onnx", "onnx24", "fp16", 2, 2, 16, 64, 160, 1024, "float16", 0, fixed=True)


def node(kind):
    return types.SimpleNamespace(op_type=kind)


def part(provider, *kinds):
    return types.SimpleNamespace(ep_name=provider, get_nodes=lambda: [node(kind) for kind in kinds])


def session(*parts):
    return types.SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)


class TestProviderOptions:
    def test_only_a_graph_on_one_provider_is_captured(self):
        assert cuda_options(GQA, captured=True)["enable_cuda_graph"] == "1"
        assert "enable_cuda_graph" not in cuda_options(GQA, captured=False)
        assert "enable_cuda_graph" not in cuda_options(ONNX24, captured=True)
        assert "enable_cuda_graph" not in cuda_options(None, captured=True)

    def test_products_keep_their_precision(self):
        assert cuda_options(None, captured=False)["use_tf32"] == "0"

    def test_an_engine_varies_in_rows_only(self):
        assert profiles(ONNX24) == {
            "trt_profile_min_shapes": "input_ids:1x1,position_ids:1x1,attention_bias:1x1x1x1024,logit_rows:1",
            "trt_profile_opt_shapes": "input_ids:1x8,position_ids:1x8,attention_bias:1x1x8x1024,logit_rows:8",
            "trt_profile_max_shapes": "input_ids:1x256,position_ids:1x256,attention_bias:1x1x256x1024,logit_rows:64",
        }

    def test_engines_are_kept_and_used_again(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path / "cache"))
        graph = tmp_path / "bundle" / "onnx" / "target.onnx"
        graph.parent.mkdir(parents=True)
        graph.write_bytes(b"graph")
        (tmp_path / "bundle" / "specedge.json").write_text("hashes of all files")
        first = tensorrt_options(graph, ONNX24)
        assert first["trt_ep_context_file_path"] == str(context_file(graph))
        # An absolute path, ONNX Runtime writes into the compiled graph and refuses when it reads it.
        assert first["trt_engine_cache_path"] == "engine"
        before = engine_folder(graph)
        assert before.is_relative_to(tmp_path / "cache")
        shutil.copytree(tmp_path / "bundle", tmp_path / "copy", copy_function=shutil.copyfile)
        assert engine_folder(tmp_path / "copy" / "onnx" / "target.onnx") == before
        (tmp_path / "bundle" / "specedge.json").write_text("hashes of other files")
        assert engine_folder(graph) != before

    def test_a_graph_in_fp32_stays_in_fp32(self, tmp_path):
        graph = tmp_path / "target.onnx"
        graph.write_bytes(b"")
        wide = GraphSpec("t.onnx", "plain", "fp32", 2, 2, 16, 64, 160, 1024, "float32", 0, fixed=True)
        assert tensorrt_options(graph, wide)["trt_fp16_enable"] == "0"
        assert tensorrt_options(graph, ONNX24)["trt_fp16_enable"] == "1"

    def test_rounded_graphs_need_a_builder_that_rounds(self, tmp_path):
        graph = tmp_path / "target.onnx"
        graph.write_bytes(b"")
        rounded = dataclasses.replace(ONNX24, precision="int8")
        assert tensorrt_options(graph, rounded)["trt_int8_enable"] == "1"
        assert tensorrt_options(graph, ONNX24)["trt_int8_enable"] == "0"

    def test_what_was_compiled_for_another_gpu_is_compiled_anew(self, tmp_path, monkeypatch):
        pytest.importorskip("onnxruntime")
        monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path))
        graph = tmp_path / "target.onnx"
        graph.write_bytes(b"graph")
        assert providers._open_compiled(graph, providers._session_options(1), ["CPUExecutionProvider"]) is None
        context_file(graph).parent.mkdir(parents=True)
        context_file(graph).write_bytes(b"of another GPU")
        assert providers._open_compiled(graph, providers._session_options(1), ["CPUExecutionProvider"]) is None
        assert not context_file(graph).exists()

    def test_each_width_names_its_own_captured_graph(self):
        pytest.importorskip("onnxruntime")
        assert providers.run_options(3).get_run_config_entry("gpu_graph_id") == "3"
        assert providers.run_options(None).get_run_config_entry("gpu_graph_id") == "-1"


class TestPlacement:
    def test_nodes_are_counted_by_provider(self):
        found = placement_of(
            session(part("CUDAExecutionProvider", "MatMul", "MatMul"), part("CPUExecutionProvider", "Shape"))
        )
        assert found == {"CUDAExecutionProvider": {"MatMul": 2}, "CPUExecutionProvider": {"Shape": 1}}
        assert placement_of(types.SimpleNamespace()) is None

    def test_work_that_landed_on_the_cpu_is_refused(self, tmp_path):
        lost = session(part("CUDAExecutionProvider", "MatMul"), part("CPUExecutionProvider", "Shape", "TopK", "TopK"))
        assert strays(placement_of(lost), "CUDAExecutionProvider") == {"TopK": 2}
        with pytest.raises(DeviceError, match=r"target.onnx: CUDAExecutionProvider leaves nodes to the CPU \(2 TopK\)"):
            providers.check_placement(lost, "CUDAExecutionProvider", tmp_path / "target.onnx")
        providers.check_placement(lost, "CPUExecutionProvider", tmp_path / "target.onnx")

    def test_onnxruntime_tells(self, tiny_bundle):
        ort = pytest.importorskip("onnxruntime")
        options = ort.SessionOptions()
        options.add_session_config_entry(placement.RECORD_KEY, "1")
        real = ort.InferenceSession(
            str(tiny_bundle / "onnx" / "target.onnx"), options, providers=["CPUExecutionProvider"]
        )
        if not hasattr(real, "get_provider_graph_assignment_info"):
            pytest.skip("this onnxruntime does not tell")
        assert placement_of(real)["CPUExecutionProvider"]["GroupQueryAttention"] == 2

    def test_a_provider_that_is_not_there(self):
        pytest.importorskip("onnxruntime")
        for device in ("cuda", "tensorrt"):
            with pytest.raises(DeviceError, match=f"device {device}: this onnxruntime .* has no .*specedge doctor"):
                providers.providers_for(device)


class TestRoom:
    def test_what_does_not_fit_is_refused_before_it_is_loaded(self, monkeypatch):
        monkeypatch.setattr(room, "available_memory", lambda: 1_000_000_000)
        Room().take("target", 900_000_000)
        with pytest.raises(MemoryBudgetError, match=r"target takes about 2,000 MB and 1,000 MB are free; close"):
            Room().take("target", 2_000_000_000)

    def test_a_budget_counts_everything(self, monkeypatch):
        monkeypatch.setattr(room, "available_memory", lambda: 10)  # who gives a budget knows better
        own = Room(1_000_000_000)
        own.take("target", 700_000_000)
        with pytest.raises(
            MemoryBudgetError, match=r"draft takes about 400 MB, with 700 MB taken of a budget of 1,000"
        ):
            own.take("draft", 400_000_000)
        own.take("heads", 300_000_000)

    def test_the_smaller_of_the_systems_and_the_groups(self, monkeypatch, tmp_path):
        source = tmp_path / "meminfo"
        source.write_text("MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
        assert room._of_system(str(source)) == 2_048_000
        limit, used = tmp_path / "max", tmp_path / "current"
        limit.write_text("5000000\n"), used.write_text("4000000\n")
        monkeypatch.setattr(room, "_CGROUPS", ((str(limit), str(used)),))
        assert room.memory_limit() == 1_000_000
        (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 2500000\n")  # files that were just hashed
        assert room.memory_limit() == 3_500_000
        monkeypatch.setattr(room, "_of_system", lambda: 700)
        assert available_memory() == 700
        limit.write_text("max\n")
        assert room.memory_limit() is None

    def test_a_card_with_memory_of_its_own_is_asked(self, monkeypatch):
        from specedge.runtime.machine import GPU

        monkeypatch.setattr(room, "available_memory", lambda: 64_000_000_000)
        card, board = (GPU("gpu", "8.9", 4_000_000_000, shared, 0.0, "13.0") for shared in (False, True))
        monkeypatch.setattr(room, "look_at_gpu", lambda: card)
        Room().take("target", 5_000_000_000)
        with pytest.raises(MemoryBudgetError, match="5,000 MB and 4,000 MB are free"):
            Room().take("target", 5_000_000_000, "cuda")
        monkeypatch.setattr(room, "look_at_gpu", lambda: board)
        Room().take("target", 5_000_000_000, "cuda")


class TestEngine:
    @pytest.fixture(autouse=True)
    def _onnxruntime(self):
        pytest.importorskip("onnxruntime")

    def test_a_model_over_budget_is_refused_and_a_draft_over_it_left_out(self, tiny_bundle):
        from specedge.runtime.engine import Engine

        with pytest.raises(MemoryBudgetError, match=r"onnx/target.onnx takes about"):
            Engine(tiny_bundle, memory_budget=1000)
        with Engine(tiny_bundle) as engine:
            spec, plain = engine.manifest.target, engine.generate("the fox", method="none", max_tokens=12)
            *_, expected = plain
        budget = 2 * spec.weight_bytes + spec.cache_bytes + 10
        with Engine(tiny_bundle, memory_budget=budget) as engine:
            *_, finish = engine.generate("the fox", method="draft", max_tokens=12)
        assert finish.ids == expected.ids
        assert finish.stats.proposed == 0
        assert any("MemoryBudgetError" in note for note in finish.stats.notes)

    def test_an_unknown_device(self, tiny_bundle):
        from specedge.runtime.engine import Engine

        with pytest.raises(UsageError, match="device is 'npu': choose one of cpu, cuda, tensorrt"):
            Engine(tiny_bundle, device="npu")
        with pytest.raises(UsageError, match="memory_budget is '1GB': give a whole number of bytes"):
            Engine(tiny_bundle, memory_budget="1GB")
        with pytest.raises(UsageError, match="captured is 'no': give True or False"):
            Engine(tiny_bundle, captured="no")


def test_how_much_of_a_law_a_reply_looks_at():
    assert Options().looked_at == 1
    assert Options(temperature=0.7).looked_at is None
    assert Options(temperature=0.7, top_k=40, top_p=0.9).looked_at == 40
    assert Options(temperature=0.7, top_k=40, accept="typical").looked_at is None
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert Options(**{penalty: 0.5}).looked_at is None
    assert Options(no_repeat_ngram=3).looked_at is None


@pytest.mark.parametrize(
    ("device", "what"), [("cuda", "CUDA has none in fp32"), ("tensorrt", "TensorRT does not know")]
)
def test_a_bundle_on_a_device_that_lacks_its_attention(tiny_bundle, device, what):
    from specedge.runtime.engine import Engine

    pytest.importorskip("onnxruntime")
    with pytest.raises(DeviceError, match=rf"onnx/target.onnx: {what}.*export the model again with --device {device}"):
        Engine(tiny_bundle, device=device)


def test_many_small_nodes_on_the_cpu_are_layers():
    few = {"CPUExecutionProvider": {"Gather": 3, "Shape": 1}, "CUDAExecutionProvider": {"MatMul": 9}}
    many = {"CPUExecutionProvider": {"Mul": 60}, "CUDAExecutionProvider": {"MatMul": 9}}
    assert strays(few, "CUDAExecutionProvider") == {}
    assert strays(many, "CUDAExecutionProvider") == {"Mul": 60}
