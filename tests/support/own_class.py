"""The example of docs/your-own-objective.md: the file and the recipe section that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

_DOCUMENT = (Path(__file__).parents[2] / "docs" / "your-own-objective.md").read_text()

EXAMPLE, _SECTION = (re.findall(rf"```{kind}\n(.*?)```", _DOCUMENT, re.DOTALL)[0] for kind in ("python", "yaml"))

SECTION: dict[str, Any] = yaml.safe_load(_SECTION)
