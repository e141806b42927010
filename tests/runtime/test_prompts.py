"""Files of prompts; what a bad line says is with the benchmark's tests."""

from __future__ import annotations

import json

import pytest

from specedge.runtime.errors import UsageError
from specedge.runtime.prompts import Prompt, read_prompts, spread


def test_id_stands_for_question_id(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": 7, "source": "somewhere", "category": "open", "turns": ["a", "b"]},
        {"question_id": "x", "id": 8, "category": "math", "turns": ["c"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert read_prompts(path) == [Prompt("7", "open", "a"), Prompt("x", "math", "c")]


def test_categories_take_turns():
    prompts = [Prompt(str(number), category, "x") for number, category in enumerate("aaabbc")]
    assert [prompt.question_id for prompt in spread(prompts, 3)] == ["0", "3", "5"]
    assert [prompt.question_id for prompt in spread(prompts, 5)] == ["0", "3", "5", "1", "4"]
    assert len(spread(prompts, 50)) == 6


def test_labels_may_be_left_out_where_nobody_reads_them(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["first"]}\n\n{"id": 7, "category": "math", "turns": ["second"]}\n', encoding="utf-8")
    assert read_prompts(path, labelled=False) == [Prompt("1", "prompt", "first"), Prompt("7", "math", "second")]
    with pytest.raises(UsageError, match=r":1: question_id is missing"):
        read_prompts(path)
    path.write_text('{"id": 7}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r":1: turns is missing"):
        read_prompts(path, labelled=False)
