"""What a broken engine may answer: each makes of right samples, as EngineDouble gives them, something that cannot be.

Answers of sampling only; one that scores prompts has no tokens, and stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

Samples = list[dict[str, Any]]
Spoil = Callable[[Samples], Any]


def _sampled(spoil: Spoil) -> Spoil:
    return lambda samples: spoil(samples) if samples and samples[0]["output_ids"] else samples


def _first(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Spoil:
    """`change` does something to the first sample and its meta_info."""

    def spoil(samples: Samples) -> Any:
        changed = deepcopy(samples)
        change(changed[0], changed[0]["meta_info"])
        return changed

    return _sampled(spoil)


def _logprob(value: object) -> Spoil:
    return _first(lambda _, meta: meta["output_token_logprobs"][-1].__setitem__(0, value))


def _literal(text: bytes) -> Spoil:
    """A log-probability as `text` has it."""
    marked = _logprob("HERE")
    return _sampled(lambda samples: json.dumps(marked(samples)).encode().replace(b'"HERE"', text))


def _token(value: Any) -> Spoil:
    def change(sample: dict[str, Any], meta: dict[str, Any]) -> None:
        sample["output_ids"][0] = meta["output_token_logprobs"][0][1] = value

    return _first(change)


def _meta(**fields: object) -> Spoil:
    return _first(lambda _, meta: meta.update(fields))


def _resized(count: Callable[[int], int]) -> Spoil:
    """Consistent in itself: as many tokens, log-probabilities and versions as `count` makes of those there are."""

    def change(sample: dict[str, Any], meta: dict[str, Any]) -> None:
        wanted = count(len(sample["output_ids"]))
        for row in (sample["output_ids"], meta["output_token_logprobs"]):
            row[:] = (row * (wanted + 1))[:wanted] if wanted < 100 else row * wanted
        version = meta["weight_version"]
        meta["weight_versions"] = [{"version": version, "start": 0, "end": len(sample["output_ids"])}]
        meta["completion_tokens"], meta["finish_reason"] = len(sample["output_ids"]), {"type": "stop", "matched": 1}

    return _first(change)


def _spans(*spans: tuple[int, int]) -> Spoil:
    def change(_: dict[str, Any], meta: dict[str, Any]) -> None:
        name = meta["weight_version"]
        meta["weight_versions"] = [{"version": name, "start": start, "end": end} for start, end in spans]

    return _first(change)


def _bytes(make: Callable[[bytes], bytes]) -> Spoil:
    return _sampled(lambda samples: make(json.dumps(samples).encode()))


def _text(written: bytes) -> Spoil:
    """The text of each sample, as JSON has it."""
    return _bytes(lambda body: body.replace(b'"text": ""', b'"text": ' + written))


BAD_ANSWERS: dict[str, Spoil] = {
    "a log-probability is NaN": _literal(b"NaN"),
    "a log-probability is -Infinity": _literal(b"-Infinity"),
    "a log-probability overflows a double": _literal(b"-1e400"),
    "a log-probability overflows float32": _literal(b"-1e39"),
    "a log-probability is an integer of 5,000 digits": _literal(b"-" + b"9" * 5000),
    "a log-probability is null": _logprob(None),
    "a log-probability is positive": _logprob(5.0),
    "a log-probability is the logarithm of 0, clamped": _logprob(-3.4028234663852886e38),
    "a log-probability is a text": _logprob("-0.5"),
    "a log-probability is a bool": _logprob(True),
    "a token is the size of the vocabulary": _token(512),
    "a token is negative": _token(-1),
    "a token does not fit 32 bits": _token(1 << 31),
    "a token does not fit 64 bits": _token(1 << 63),
    "a token has 40 digits": _token(10**39),
    "a token is a fraction": _token(1.5),
    "a token is a bool": _token(True),
    "a token is a text": _token("1"),
    "a token is null": _token(None),
    "there is a token more than asked": _resized(lambda count: count + 1),
    "there are 10,000 times as many tokens as asked": _resized(lambda _: 10_000),
    "the response is empty": _resized(lambda _: 0),
    "a log-probability is missing": _first(lambda _, meta: meta["output_token_logprobs"].pop()),
    "all log-probabilities are missing": _meta(output_token_logprobs=None),
    "log-probabilities belong to other tokens": _first(lambda sample, _: sample["output_ids"].reverse()),
    "a log-probability has a fourth entry": _first(lambda _, meta: meta["output_token_logprobs"][0].append(None)),
    "versions end at 10^8": _spans((0, 10**8)),
    "versions end at 2^62": _spans((0, 1 << 62)),
    "versions begin before 0": _spans((-5, 4)),
    "versions leave a token out": _spans((0, 1), (2, 4)),
    "versions overlap": _spans((0, 3), (1, 4)),
    "versions are missing at the end": _spans((0, 1)),
    "versions go back": _spans((0, 9), (9, 4)),
    "no versions": _meta(weight_versions=[]),
    "seconds are NaN": _meta(e2e_latency=float("nan")),
    "seconds are infinite": _meta(e2e_latency=float("inf")),
    "seconds are negative": _meta(e2e_latency=-1.0),
    "seconds in the queue are NaN": _meta(queue_time=float("nan")),
    "seconds are a text": _meta(e2e_latency="1"),
    "no seconds": _first(lambda _, meta: meta.pop("e2e_latency")),
    "an end that nobody knows": _meta(finish_reason={"type": "done"}),
    "an end that is null": _meta(finish_reason=None),
    "what SGLang says of NaN": _meta(finish_reason={"type": "stop", "matched": "NaN happened"}),
    "another number of tokens is said": _meta(completion_tokens=99),
    "another prompt is answered": _meta(prompt_tokens=99),
    "no ids": _first(lambda sample, _: sample.pop("output_ids")),
    "a sample too few": _sampled(lambda samples: samples[1:]),
    "a sample too many": _sampled(lambda samples: [*samples, *samples[:1]]),
    "10,000 samples": _sampled(lambda samples: samples[:1] * 10_000),
    "an object, not a list": _sampled(lambda samples: samples[0]),
    "a list of lists": _sampled(lambda samples: [[sample] for sample in samples]),
    "null": _sampled(lambda _: None),
    "nothing": _sampled(lambda _: b""),
    "half of it": _bytes(lambda body: body[: len(body) // 2]),
    "something behind it": _bytes(lambda body: body + b"[]"),
    "something before it": _bytes(lambda body: body.replace(b"[", b"[1, ", 1)),
    "one bracket too many": _bytes(lambda body: b"[" + body),
    "a quote that does not end": _text(b'"'),
    "no UTF-8": _text(b'"", "id": "\xff\xfe"'),
    "half of a surrogate pair": _bytes(
        lambda body: body.replace(b'"weight_version": "', b'"weight_version": "\\ud800')
    ),
    "nested 100,000 deep": _text(b"[" * 100_000 + b"]" * 100_000),
    "8 MB of blanks": _sampled(lambda _: b"[" + b" " * (1 << 23) + b"]"),
    "a text of 8 MB": _text(b'"' + b"x" * (1 << 23) + b'"'),
}
"""What is wrong → how it is made wrong. The double samples four tokens or more below 512."""
