"""What a real SGLang 0.5.23 answers, recorded: `python -m tests.support.recorded_answers` writes the file anew.

tests/integration/test_engine.py compares the record with a running server, kind by kind.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from tests.support.engines import KEY, ROWS, TinyEngine, TinyEngines

FILE = Path(__file__).parents[1] / "golden" / "engine_answers.json"
CALLS: Mapping[str, tuple[str, str, Any]] = {
    "model_info": ("GET", "/model_info", None),
    "server_info": ("GET", "/server_info", None),
    "checksums": ("POST", "/weights_checker", {"action": "checksum"}),
    "formats": ("POST", "/weights_checker", {"action": "formats"}),
    "generate": (
        "POST",
        "/generate",
        {
            "input_ids": [ROWS[0]],
            "sampling_params": {"n": 3, "max_new_tokens": 6, "temperature": 1.0},
            "return_logprob": True,
        },
    ),
    "kept": (
        "POST",
        "/generate",
        {
            "input_ids": [ROWS[0], ROWS[0]],
            "sampling_params": {"n": 1, "max_new_tokens": 4, "temperature": 1.0, "top_p": 0.8, "top_k": 20},
            "return_logprob": True,
            "return_sampling_mask": True,
        },
    ),
    "scores": (
        "POST",
        "/generate",
        {
            "input_ids": ROWS[:2],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    ),
}
"""Name → method, path and request."""
PROMPT, SCORED = ROWS[0], ROWS[:2]
_SERVER_INFO = ("version", "quantization", "device")
"""Of the hundreds of settings that a server names, those that are read."""


@cache
def recorded() -> dict[str, Any]:
    """Name of a call → what was answered."""
    return dict(json.loads(FILE.read_text()))


def ask_all(engine: TinyEngine, update: int) -> dict[str, Any]:
    """What a running engine answers to the calls."""
    from rollout_sglang.server.update_fence import UPDATE_HEADER

    headers = {"Authorization": f"Bearer {KEY}", UPDATE_HEADER: str(update)}
    found = {}
    with httpx.Client(headers=headers, timeout=120.0, trust_env=False) as http:
        for name, (method, path, request) in CALLS.items():
            found[name] = http.request(method, f"{engine.spec.url}{path}", json=request).raise_for_status().json()
    found["server_info"] = {name: found["server_info"].get(name) for name in _SERVER_INFO}
    return found


def _record() -> None:
    from rollout_sglang.weights.update_lease import fresh_number

    with tempfile.TemporaryDirectory() as folder:
        engines = TinyEngines(Path(folder))
        try:
            engine = engines.lease(["fp32"])["fp32"]
            text = json.dumps(ask_all(engine, fresh_number()), separators=(",", ":"))
            FILE.write_text(text.replace(str(engine.checkpoints[0]), "/models/tiny") + "\n")
        finally:
            engines.close()


if __name__ == "__main__":
    _record()
