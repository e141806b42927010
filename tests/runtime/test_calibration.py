from __future__ import annotations

import json

import pytest

from specedge.runtime.calibration import calibration_json, read_calibration
from specedge.tests.calibrations import calibration


def test_a_calibration_comes_back_as_it_was():
    found = calibration(3, 10)
    assert read_calibration(json.loads(json.dumps(calibration_json({"medusa": found})))) == {"medusa": found}
    assert found.expected(2) == 1.75


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("heads",), [], "heads is not an object"),
        (("more",), {}, "keys"),
        (("heads", "medusa", "positions"), "9", "positions is '9'"),
        (("heads", "medusa", "top"), [[2.0] * 10] * 3, "not between 0 and 1"),
        (("heads", "medusa", "top"), 3, "no list"),
        (("heads", "medusa", "values"), [True] * 6, "no number"),
        (("heads", "medusa", "paths"), [[0.5]] * 6, "no whole number"),
        (("heads", "medusa", "paths"), [[10]] * 6, "beyond a head's guesses"),
        (("heads", "medusa", "paths"), [[0]] * 6, "stands twice"),
        (("heads", "medusa", "paths"), [[0]], "1 paths with 6 values"),
        (("heads", "medusa", "more"), 1, "unknown key"),
    ],
)
def test_a_calibration_that_makes_no_sense_is_refused(path, value, said):
    raw = json.loads(json.dumps(calibration_json({"medusa": calibration(3, 10)})))
    place = raw
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises((ValueError, TypeError), match=said):
        read_calibration(raw)
