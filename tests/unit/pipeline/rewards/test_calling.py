"""How reward functions are called: what they get, what they may return, and what is tried again."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests

from pipeline.rewards import calling, messages
from pipeline.rewards.calling import as_judgment, call, wants_of
from pipeline.rewards.messages import Judgment, decode_judgment, encode_judgment, failure, together, without_secrets
from pipeline.rewards.pool import Verdict, Verifiers

PAGE = Path(__file__).parents[4] / "docs" / "rewards.md"
INFO = [dict(prompt_tokens=3, response_tokens=n, finish="stop" if n == 1 else "length") for n in (1, 2)]


def test_an_answer_to_another_request_is_refused() -> None:
    answer = encode_judgment("asked", Judgment(1.0, {}))
    assert decode_judgment("asked", answer).reward == 1.0
    with pytest.raises(messages.BadMessageError, match="it answers another request"):
        decode_judgment("another", answer)


@pytest.fixture(autouse=True)
def examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def verdicts(reward: str, *responses: str, info: Any = None, **settings: Any) -> list[Verdict]:
    with Verifiers(reward, 1, settings.pop("deadline_s", 30.0), sandbox=None, **settings) as verifiers:
        return asyncio.run(verifiers.score_group("question", "yes", {}, responses, info))


@pytest.mark.parametrize(
    ("result", "reward", "parts"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        ((0.5, {"a": 1}), 0.5, {"a": 1.0}),
        ({"reward": 0.5, "a": True}, 0.5, {"a": 1.0}),
    ],
)
def test_what_a_function_may_return(result: Any, reward: float, parts: dict[str, float]) -> None:
    assert as_judgment(result) == Judgment(reward, parts)


@pytest.mark.parametrize("result", [None, "x", {}, {"score": 1}, {"reward": None}, (1, 2), (1, {}, 3), {"reward": {}}])
def test_what_it_may_not(result: Any) -> None:
    found = as_judgment(result)
    assert found.failed == "bad_result"
    assert 'expected a number, (number, {part: number}) or {"reward": number' in found.detail


def test_a_verdict_is_rounded_to_float32_where_it_enters_the_run() -> None:
    (found,) = verdicts("reward_examples:sums_its_parts", "yes")
    assert (found.reward, found.parts) == (1.0, {"sum": 1.0})


def test_a_part_that_says_that_the_verifier_failed_is_not_a_function_s_to_give() -> None:
    (found,) = verdicts("reward_examples:says_that_it_failed", "yes")
    assert found == Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed="bad_result")


GIVEN = dict(prompt="P", response="R", answer="A", metadata={}, info={})


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda response, answer, *args: (response, answer, args), ("R", "A", ())),
        (lambda response, answer, *args, **rest: (args, [*rest]), ((), ["prompt", "metadata", "info"])),
        (lambda question, reply, truth, **rest: (question, reply, truth, rest), ("P", "R", "A", {})),
        (lambda question, reply, truth, /: (question, reply, truth), ("P", "R", "A")),
        (lambda *texts, **rest: (texts, rest), (("P", "R", "A"), {})),
        (lambda **rest: [*rest], [*GIVEN]),
        (lambda scale=2.0, **rest: (scale, rest["answer"]), (2.0, "A")),
    ],
)
def test_a_function_gets_what_it_names(function: Callable[..., Any], got: Any) -> None:
    wants_of(function)
    assert call(function, **GIVEN) == got


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            lambda response, answer, question: 0.0,
            r"\(response, answer, question\): missing .*'question'; name some of prompt, ",
        ),
        (lambda response, *, truth: 0.0, "missing .*'truth'"),
        (lambda reply, truth: 0.0, "too many positional arguments; .* take prompt, response, answer in this order"),
        (lambda responses, references: [], "missing .*'references'; name some of prompts, responses, answers, "),
        (lambda responses, prompt: [], "missing .*'prompt'"),
        (lambda prompts, completions: [], "too many positional arguments"),
        (lambda data_source, solution, truth: 0.0, "missing .*'solution'; name some of .*, solution_str, ground_truth"),
        (lambda data_sources, solution_strs, ground_truths: [], "verl's batched rewards; name responses, answers and"),
    ],
)
def test_a_function_that_would_get_wrong_texts_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        wants_of(function)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """As verl has it."""
    return dict(score=float(solution_str == ground_truth), source=data_source, extra=extra_info)


@pytest.mark.parametrize(
    ("metadata", "source", "extra"),
    [
        (dict(data_source="gsm8k", extra_info=dict(index=3)), "gsm8k", dict(index=3)),
        (dict(level="easy"), "", dict(level="easy")),
    ],
)
def test_a_reward_of_verl_gets_what_verl_calls_it(metadata: dict[str, Any], source: str, extra: Any) -> None:
    """By position it would get the prompt as its data_source."""
    assert wants_of(compute_score) == {"verl"}
    got = call(compute_score, **GIVEN | dict(response="7", answer="7", metadata=metadata))
    assert got == dict(score=1.0, source=source, extra=extra)
    assert as_judgment(dict(score=1.0, acc=True, pred="7"), verl=True) == Judgment(1.0, {"acc": 1.0})


def test_a_reward_of_verl_is_judged_in_its_process() -> None:
    assert [one.reward for one in verdicts("reward_examples:compute_score", "yes", "no")] == [1.0, 0.0]


def test_too_many_parts_are_told_as_that() -> None:
    (found,) = verdicts("reward_examples:of_many_parts", "64")
    assert (found.reward, len(found.parts)) == (1.0, 64)
    assert (
        as_judgment((1.0, {f"part {n}": 1.0 for n in range(65)})).detail
        == "returned 65 parts, expected at most 64; give fewer"
    )
    assert "expected 64 letters or fewer" in as_judgment((1.0, {"x" * 65: 1.0})).detail


def test_info_tells_lengths_end_and_siblings() -> None:
    found = verdicts("reward_examples:of_info", "a", "b", info=INFO)
    assert [(one.reward, one.parts) for one in found] == [
        (1.0, dict(siblings=2.0, cut=0.0)),
        (2.0, dict(siblings=2.0, cut=1.0)),
    ]


def test_a_batched_function_is_called_once_for_a_group() -> None:
    found = verdicts("reward_examples:batched", "a", "bbb", "")
    assert [(one.reward, one.parts["rank"]) for one in found] == [(1.0, 0.0), (3.0, 1.0), (0.0, 2.0)]
    found = verdicts("reward_examples:batched_of_info", "a", "b", info=INFO)
    assert [one.reward for one in found] == [1.0, 2.0]
    short = verdicts("reward_examples:one_too_few", "a", "b")
    assert [one.failed for one in short] == ["bad_result", "bad_result"]


def test_an_async_function_has_several_samples_under_way() -> None:
    for concurrency, least, most in ((1, 1, 1), (4, 2, 4)):
        found = verdicts("reward_examples:together", *["0.05"] * 8, concurrency=concurrency)
        assert {one.failed for one in found} == {None}
        assert least <= max(one.parts["at_once"] for one in found) <= most


def test_one_call_that_is_late_costs_its_own_sample() -> None:
    found = verdicts("reward_examples:together", "60", "0", "0", "0", concurrency=4, deadline_s=1.0)
    assert [one.failed for one in found] == ["timeout", None, None, None]


@pytest.mark.parametrize(("response", "reason"), [("die", "crashed"), ("block", "timeout")])
def test_a_call_that_ends_the_process_costs_its_own_sample(response: str, reason: str) -> None:
    settings: dict[str, Any] = dict(concurrency=8, deadline_s=1.0)
    found = verdicts("reward_examples:dies_or_blocks", "ok", response, *["ok"] * 6, **settings)
    assert [one.failed for one in found] == [None, reason, *[None] * 6]


def test_judgments_of_a_request() -> None:
    several = together([Judgment(1.0, {"a": 2.0}), failure("raised", "x" * 600), Judgment(0.0, {})])
    read = decode_judgment("k", encode_judgment("k", several))
    assert read.of_each(3) == [Judgment(1.0, {"a": 2.0}), several.rest[0], Judgment(0.0, {})]
    assert [one.failed for one in failure("timeout", "").of_each(2)] == ["timeout"] * 2
    assert [one.failed for one in several.of_each(2)] == ["bad_result"] * 2
    assert len(encode_judgment("k", together([Judgment(0.1, {"part": 0.1})] * 1000))) < messages.MAX_JUDGMENT_BYTES


@pytest.mark.parametrize("detail", ["no\nerror: the disk is full\x1b[2J", "a\r\nb\u2028c\x9b"])
def test_what_failed_is_one_line_without_control_characters(detail: str) -> None:
    """It goes into the log, whose lines are read as errors of ours, and from there to a terminal."""
    forged = Judgment(0.0, {}, "raised", detail)
    for shown in (failure("raised", detail).detail, decode_judgment("k", encode_judgment("k", forged)).detail):
        assert shown.isprintable()
        assert len(shown) <= 500


def answered(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://judge")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (answered(429), True),
        (answered(503), True),
        (answered(401), False),
        (httpx.ConnectError("refused"), True),
        (httpx.ReadTimeout("late"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (KeyError("score"), False),
        (PermissionError(1, "Operation not permitted"), False),
        (httpx.InvalidURL("no scheme"), False),
        (httpx.DecodingError("no gzip"), False),
        (requests.exceptions.JSONDecodeError("no JSON", "", 0), False),
        (requests.exceptions.ConnectTimeout(), True),
        (aiohttp.InvalidURL("no host"), False),
        (aiohttp.ServerDisconnectedError(), True),
        (openai.OpenAIError("api_key must be set"), False),
        (openai.APITimeoutError(httpx.Request("POST", "http://judge")), True),
        (urllib.error.URLError("refused"), True),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    calls = 0

    def call() -> Any:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(type(error)):
        calling.retried(call, 3)
    assert (calls, len(slept)) == ((4, 3) if again else (1, 0))
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(slept))


def test_secrets_of_the_environment_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    assert without_secrets("401 for https://judge/?key=sk-0123456789") == "401 for https://judge/?key=$JUDGE_API_KEY"
    assert failure("raised", "no sk-0123456789").detail == "no $JUDGE_API_KEY"
    for cut in (0, 180, 195):  # also where it is cut off
        assert "sk-01" not in as_judgment("x" * cut + "sk-0123456789").detail


def test_nor_are_they_said_in_an_address_or_in_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key may be the beginning of another."""
    monkeypatch.setenv("A_KEY", "ab/cd+efgh==")
    monkeypatch.setenv("B_KEY", "ab/cd+efgh==ijkl\n")
    monkeypatch.setenv("PASSWORD", "it's\\two")
    asked = httpx.Request("GET", "https://judge/", params=dict(a="ab/cd+efgh==", b="ab/cd+efgh==ijkl"))
    assert failure("raised", f"401 for {asked.url}").detail == "401 for https://judge/?a=$A_KEY&b=$B_KEY"
    assert as_judgment(dict(reward="it's\\two")).detail.startswith("returned {'reward': \"$PASSWORD\"}")


class Judge(BaseHTTPRequestHandler):
    """Of every three requests the first is refused for a moment. A question with "wrong" gets no number."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012 - one server at a time
    status: Callable[[int], int] = staticmethod(lambda number: 503 if number % 3 == 0 else 200)

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        status = type(self).status(len(self.asked))
        self.asked.append((self.headers["Authorization"], question))
        content = "no number" if "wrong" in question else "8"
        body = json.dumps(dict(choices=[dict(message=dict(content=content))])).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Judge]]:
    """The judge of docs/rewards.md, as the module `judges`, and a server that it asks."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "httpx" in block]
    (tmp_path / "judges.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Judge, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Judge
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_judge_of_the_page_asks_again_and_gives_parts(judge: type[Judge], caplog: pytest.LogCaptureFixture) -> None:
    found = verdicts("judges:judge", "right", "cut", "wrong", info=[*INFO, INFO[0]], concurrency=8, retries=5)
    assert [(one.reward, one.parts) for one in found[:2]] == [
        (pytest.approx(0.8), dict(rating=pytest.approx(0.8), brief=1.0)),
        (0.0, dict(rating=pytest.approx(0.8), brief=0.0)),
    ]
    assert found[2].failed == "raised"
    assert "could not convert string to float: 'no number'" in caplog.text
    assert len(judge.asked) > 3, "what was refused was asked again"
    assert {key for key, _ in judge.asked} == {"Bearer sk-0123456789"}
    assert "sk-0123456789" not in caplog.text
