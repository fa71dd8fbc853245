"""What programs are given."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from launch.terminal import emit


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    emit(dict(gap=math.inf, layouts=[dict(difference=float("nan")), (1.5, -math.inf)], of=np.float64("nan"), steps=3))
    said = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(said, parse_constant=refuse) == dict(
        gap=None, layouts=[dict(difference=None), [1.5, None]], of=None, steps=3
    )
