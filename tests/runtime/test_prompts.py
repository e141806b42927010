"""Files of prompts; what a bad line says is with the benchmark's tests."""

from __future__ import annotations

import json

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
