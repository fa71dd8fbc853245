"""What the attributes of a batch must look like: kinds and bounds, before anything is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from precision.text.short import one_line

MOST_OPEN = 1 << 22
"""Groups under way: a stage of a million prompts has fewer."""
_Number = Annotated[int, Field(ge=0, lt=1 << 53)]
_Text = Annotated[str, Field(max_length=1000)]
_Range = Annotated[list[_Number], Field(min_length=2, max_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Contract(_Strict):
    temperature: float
    top_p: float
    top_k: int
    tokenizer_sha256: _Text
    kept_set: bool


class _Dropped(_Strict):
    group: _Number
    reason: _Text
    kind: _Text
    problem: int
    samples: _Number
    solved: _Number


class _Array(_Strict):
    dtype: _Text
    shape: list[_Number]
    sha256: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


class _Attributes(_Strict):
    model_config = ConfigDict(extra="ignore")

    index: _Number
    recipe_sha256: _Text
    contract: _Contract
    dropped: list[_Dropped]
    next_group: _Number
    open_groups: list[_Range]
    reward_part_names: list[_Text]
    optional_arrays: list[_Text]
    sources: dict[Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")], _Range] = {}
    repeated: _Number = 0
    arrays: dict[_Text, _Array]


def check_attributes(attributes: Mapping[str, Any]) -> None:
    """Raises ValueError, on one line, for what no writer of batches writes."""
    try:
        found = _Attributes.model_validate_json(json.dumps(dict(attributes)))
    except ValidationError as error:
        raise ValueError(f"its attributes are damaged ({problem_of(error)})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"its attributes are damaged ({one_line(error, 200)})") from None
    count = sum(stop - start for start, stop in found.open_groups)
    if count > MOST_OPEN or any(start >= stop for start, stop in found.open_groups):
        raise ValueError(f"open_groups names {count} groups, expected ascending ranges of {MOST_OPEN} at most in all")


def problem_of(error: ValidationError) -> str:
    """The first thing that pydantic found, and where."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return one_line(f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}", 300)
