"""The benchmark on engines that answer from a script, with clocks that are known."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from specedge.runtime import bench, bench_report, files
from specedge.runtime.errors import StorageError, UsageError
from specedge.runtime.events import Finish, Stats, Token

BLOCK = {
    "tau", "alpha", "ms_per_token", "speedup", "draft_ms", "verify_ms", "host_ms", "step_p99_ms", "equal", "lossless",
}  # fmt: skip


def finish(
    method: str, ids: tuple[int, ...], passes: int, decode_ms: float, evaluated: int = 0, accepted: int = 0
) -> Finish:
    stats = Stats(
        method=method, lossless=True, prompt_tokens=3, cached_tokens=0, tokens=len(ids), passes=passes,
        proposed=evaluated, evaluated=evaluated, accepted=accepted, ttft_ms=900.0, prefill_ms=900.0,
        decode_ms=decode_ms, draft_ms=decode_ms * 0.25, verify_ms=decode_ms * 0.7, host_ms=decode_ms * 0.05,
        peak_memory_bytes=1, notes=("the drafter failed",) if method == "ngram" else (),
    )  # fmt: skip
    return Finish("length", "", (1, 2, 3), ids, stats)


@dataclass
class FakeEngine:
    """Answers each prompt with as many tokens as asked, at a fixed price a pass."""

    folder: str = "main"
    log: list[tuple[str, str, int, int]] = field(default_factory=list)
    wrong: str | None = None
    tokenizer: str = "abc"
    fresh: bool = False
    closed: bool = False

    methods = ("none", "draft:self-int4", "ngram")
    target = None

    def __post_init__(self) -> None:
        graph = SimpleNamespace(capacity=64, precision="fp32")
        self.manifest = SimpleNamespace(
            name="tiny", device="cpu", target=graph, vocab_size=100,
            drafts={"self-int4": SimpleNamespace(capacity=60, precision="int4")},
            files={"tokenizer.json": SimpleNamespace(sha256=self.tokenizer)},
        )  # fmt: skip
        self.text = SimpleNamespace(chat_prompt=lambda messages: [len(word) for word in messages[0]["content"].split()])

    def resolve_method(self, method: str) -> str:
        resolved = "draft:self-int4" if method == "draft" else method
        if resolved not in self.methods:
            raise UsageError(f"method {method!r} is not in {self.folder}")
        return resolved

    def model(self, method: str) -> None:
        return None

    def reset(self) -> None:
        self.fresh = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def generate(self, ids, options):
        assert self.fresh, "the cache must be emptied before every reply"
        self.fresh = False
        self.log.append((self.folder, options.method, len(ids), options.max_tokens))
        tokens = tuple(range(options.max_tokens))
        decoded = len(tokens) - 1
        if options.method == self.wrong:
            tokens = (*tokens[:-1], 99)
        yield Token(tokens[0], "", "bonus")
        if options.method == "none":
            yield finish("none", tokens, decoded, 10.0 * decoded)
        elif options.method.startswith("draft"):
            # Two tokens a pass, one of them drafted, at 1.25 times the price of a plain pass.
            passes = (decoded + 1) // 2
            yield finish("draft:self-int4", tokens, passes, 12.5 * passes, decoded, decoded // 2)
        else:
            yield finish("ngram", tokens, decoded, 20.0 * decoded)


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["one two three", "not asked"]},
        {"question_id": 2, "category": "math", "turns": ["one two"]},
        {"question_id": "3", "category": "writing", "turns": ["one two three four"]},
        {"question_id": 4, "category": "math", "turns": ["word " * 80]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def engines(monkeypatch):
    """Engines by folder; those not put here are made when opened."""
    made: dict[str, FakeEngine] = {}

    def make(folder, threads=None, device=None):
        name = str(folder)
        return made.setdefault(name, FakeEngine(name))

    monkeypatch.setattr("specedge.runtime.engine.Engine", make)
    return made


def test_numbers_of_every_method(engines, prompts_file):
    result = bench.run("main", prompts_file, max_tokens=21, threads=2)
    assert result["prompts"] == 3
    assert result["skipped"] == 1
    assert (result["model"], result["precision"], result["device"], result["threads"]) == ("tiny", "fp32", "cpu", 2)
    assert list(result["methods"]) == ["none", "draft:self-int4", "ngram"]
    plain, draft, ngram = result["methods"].values()
    assert plain["tau"] == 1.0
    assert plain["alpha"] is None
    assert plain["ms_per_token"] == {"median": 10.0, "p95": 10.0}
    assert plain["speedup"] == {"median": 1.0}
    assert draft["tau"] == 2.0
    assert draft["alpha"] == 0.5
    assert draft["ms_per_token"]["median"] == 6.25
    assert draft["speedup"]["median"] == 1.6
    assert (draft["draft_ms"], draft["verify_ms"], draft["host_ms"]) == (3.125, 8.75, 0.625)
    assert ngram["speedup"]["median"] == 0.5
    assert all(block["equal"] and block["lossless"] for block in result["methods"].values())
    assert result["notes"] == ["ngram: the drafter failed"]
    for block in result["methods"].values():
        assert set(block) == BLOCK | {"categories"}
        assert set(block["categories"]) == {"writing", "math"}
        assert all(set(inner) == BLOCK for inner in block["categories"].values())
    assert all(engine.closed for engine in engines.values())


def test_prefill_does_not_count(engines, prompts_file):
    """The fake's first pass takes 900 ms; only the 10 ms passes after it may show."""
    result = bench.run("main", prompts_file, methods=["none"], max_tokens=2)
    assert result["methods"]["none"]["ms_per_token"]["p95"] == 10.0


def test_contenders_alternate_in_a_rotating_order(engines, prompts_file):
    bench.run("main", prompts_file, baselines=["other/plain"], methods=["draft:self-int4"], max_tokens=21)
    first, other = engines["main"], engines["other/plain"]
    assert [entry[1] for entry in first.log[:2]] == ["none", "draft:self-int4"]
    assert all(entry[3] < 21 for entry in (*first.log[:2], other.log[0])), "the warm-up is short"
    order: list[str] = []
    first.log, other.log = LogInto(order), LogInto(order)
    bench.run("main", prompts_file, baselines=["other/plain"], methods=["draft:self-int4"], max_tokens=21)
    a, b, c = "main none", "main draft:self-int4", "other/plain none"
    assert order == [a, b, c, a, b, c, b, c, a, c, a, b]


class LogInto(list):
    """A log that notes the order over several engines."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def append(self, entry) -> None:
        self.order.append(f"{entry[0]} {entry[1]}")


def test_another_bundle_is_compared_but_not_called_lossless(engines, prompts_file):
    engines["bundles/int4"] = FakeEngine("bundles/int4", wrong="none")
    block = bench.run("main", prompts_file, baselines=["bundles/int4"], max_tokens=4)["methods"]["none@int4"]
    assert not block["lossless"]
    assert not block["equal"]
    assert block["speedup"]["median"] == 1.0


def test_a_wrong_token_shows_in_equal(engines, prompts_file):
    engines["main"] = FakeEngine("main", wrong="draft:self-int4")
    methods = bench.run("main", prompts_file, max_tokens=9)["methods"]
    assert not methods["draft:self-int4"]["equal"]
    assert not methods["draft:self-int4"]["categories"]["math"]["equal"]
    assert methods["ngram"]["equal"]


def test_one_token_replies_have_no_times(engines, prompts_file):
    block = bench.run("main", prompts_file, methods=["none"], max_tokens=1)["methods"]["none"]
    assert block["tau"] is None
    assert block["ms_per_token"] == {"median": None, "p95": None}
    assert block["speedup"] == {"median": None}
    assert block["host_ms"] is None


def test_the_limit_is_a_category(engines, prompts_file):
    assert [prompt.question_id for prompt in bench.read_prompts(prompts_file, 1)] == ["1", "2"]
    assert bench.run("main", prompts_file, limit=1, max_tokens=2)["prompts"] == 2


def test_draft_is_a_name_as_method_takes_it(engines, prompts_file):
    result = bench.run("main", prompts_file, methods=["draft"], max_tokens=5)
    assert list(result["methods"]) == ["none", "draft"]


def test_prompts_and_draft_lengths_may_be_given(engines, prompts_file, monkeypatch):
    taken = []
    monkeypatch.setattr(
        FakeEngine,
        "generate",
        lambda self, ids, options, real=FakeEngine.generate: (
            taken.append((options.method, options.draft_length)),
            real(self, ids, options),
        )[1],
    )
    prompts = bench.read_prompts(prompts_file, 1)
    result = bench.run("main", prompts, methods=["draft", "ngram"], draft_lengths={"draft": 2}, max_tokens=5)
    assert result["prompts"] == 2 and result["draft_lengths"] == {"draft": 2}
    assert set(taken) == {("none", 4), ("draft:self-int4", 2), ("ngram", 4)}
    assert "draft_lengths" not in bench.run("main", prompts, max_tokens=5)


def test_progress_counts_every_answer(engines, prompts_file):
    seen = []
    bench.run("main", prompts_file, max_tokens=2, progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(10))
    assert seen[-1] == (9, 9, "")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not an object"),
        ('{"category": "a", "turns": ["x"]}', "question_id is missing"),
        ('{"question_id": 1, "turns": ["x"]}', "category is missing"),
        ('{"question_id": 1, "category": "a"}', "turns is missing"),
        ('{"question_id": true, "category": "a", "turns": ["x"]}', "question_id"),
        ('{"question_id": 1, "category": "\\u001b[31m", "turns": ["x"]}', "category"),
        ('{"question_id": 1, "category": "a", "turns": []}', "turns"),
        ('{"question_id": 1, "category": "a", "turns": [" "]}', "turns"),
        ('{"question_id": 1, "category": "a", "turns": "x"}', "turns"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question_id": 0, "category": "a", "turns": ["x"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=complaint) as caught:
        bench.read_prompts(path)
    assert f"{path}:2: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_prompts(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(b"\n")
    with pytest.raises(UsageError, match="no prompt in this file"):
        bench.read_prompts(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        bench.read_prompts(path)
    with pytest.raises(UsageError, match="No such file"):
        bench.read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match="limit is 0"):
        bench.read_prompts(path, 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"methods": ["magic"]}, "method 'magic' is not in main"),
        ({"max_tokens": 1000}, "no prompt leaves room"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"draft_length": 0}, "draft_length is 0"),
        ({"baselines": ["a/int4", "b/int4"]}, "two baselines"),
        ({"baselines": ["stranger"]}, "another model"),
    ],
)
def test_bad_arguments(engines, prompts_file, arguments, complaint):
    engines["stranger"] = FakeEngine("stranger", tokenizer="xyz")
    with pytest.raises(UsageError, match=complaint):
        bench.run("main", prompts_file, **arguments)
    opened = [engine for name, engine in engines.items() if name != "stranger" or "baselines" in arguments]
    assert all(engine.closed for engine in opened if engine.folder in ("main", *arguments.get("baselines", ())))


def test_the_table_shows_every_method_and_category(engines, prompts_file):
    from rich.console import Console

    console = Console(width=160, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(bench.table(bench.run("main", prompts_file, max_tokens=21)))
    text = capture.get()
    for expected in ("none", "draft:self-int4", "ngram", "1.60 ×", "writing", "math", "5.0%", "1 prompts skipped"):
        assert expected in text


def test_the_result_is_written_beside_and_renamed(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    bench_report.write_result({"model": "a"}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == {"model": "a"}

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        bench_report.write_result({"model": "b"}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == {"model": "a"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
