from __future__ import annotations

from dataclasses import replace

import pytest

from specedge.models.medusa import HeadsConfig, read_config, tensor_shapes
from specedge.runtime.errors import CheckpointError

PLAIN = HeadsConfig(heads=2, hidden_size=8, vocab_size=30)
WIDE = replace(PLAIN, width=6, blocks=2, chain=True, taps=(1, 3), vocabulary=10, lm_head="lowrank", rank=4)


@pytest.mark.parametrize("config", [PLAIN, WIDE, replace(PLAIN, lm_head="own")])
def test_a_description_comes_back_as_it_was(config):
    assert read_config(config.to_json(), "here") == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[]", "unknown keys"),
        ('{"heads": 2, "hidden_size": 8, "vocab_size": 30, "surprise": 1}', "unknown keys"),
        ('{"heads": 0, "hidden_size": 8, "vocab_size": 30}', "heads is 0"),
        ('{"heads": 2, "hidden_size": 8, "vocab_size": 30, "vocabulary": 31}', "vocabulary is 31"),
        ('{"heads": 2, "hidden_size": 8, "vocab_size": 30, "chain": 1}', "another type"),
        ('{"heads": 2, "hidden_size": 8, "vocab_size": 30, "chain": true}', "have a width"),
        ('{"heads": 2, "hidden_size": 8, "vocab_size": 30, "lm_head": "lowrank"}', "a rank goes with"),
        ('{"heads": 2, "hidden_size": 8, "vocab_size": 30, "width": 4, "taps": [-1]}', "taps are"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(text, said):
    with pytest.raises(CheckpointError, match=f"here: no description of heads .*{said}"):
        read_config(text, "here")


def test_shapes():
    assert dict(tensor_shapes(PLAIN)) == {
        "heads.0.blocks.0.square.weight": (8, 8),
        "heads.0.blocks.0.square.bias": (8,),
        "heads.1.blocks.0.square.weight": (8, 8),
        "heads.1.blocks.0.square.bias": (8,),
    }
    wide = dict(tensor_shapes(WIDE))
    assert wide["fuse.weight"] == (8, 16)
    assert wide["heads.1.blocks.0.wide.weight"] == (6, 16)
    assert wide["heads.1.blocks.1.wide.weight"] == (6, 8)
    assert wide["heads.1.lm_head.up"] == (10, 4)
