"""Announcements of engines: what is none is refused, with the file and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.integrity.sealed import write_sealed_json
from pipeline.data.membership import Membership
from pipeline.errors import StoreError


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("000001.json", dict(url="http://a:1", started="2"), "started: Input should be a valid integer"),
        ("000001.json", dict(url="http://a:1", started=True), "started: Input should be a valid integer"),
        ("000001.json", dict(url="http://a:1", started=-1), "started: Input should be greater than or equal to 0"),
        ("000001.json", dict(url="http://a:1", started=2**70), "started"),
        ("000001.json", dict(url=7), "url: Input should be a valid string"),
        ("000001.json", dict(started=0), "url: Field required"),
        ("000001.json", dict(url="file:///etc/passwd"), "url: String should match"),
        ("000001.json", dict(url="http://a\r\nX: 1"), "url: String should match"),
        ("000001.json", dict(url="http://" + "a" * 2000), "url: String should match"),
        ("000001.json", dict(url="http://a:1", quant_map=["x"]), "quant_map: Input should be a valid string"),
        ("065535.json", dict(url="http://a:1"), "engine 65535, expected at most 65534"),
        ("9999999999999.json", dict(url="http://a:1"), "engine 9999999999999, expected at most 65534"),
        ("router.json", dict(url=None), "url: Input should be a valid string"),
    ],
)
def test_announcements_that_cannot_be(tmp_path: Path, name: str, data: dict[str, object], message: str) -> None:
    write_sealed_json(tmp_path / name, data)
    membership = Membership(tmp_path)
    with pytest.raises(StoreError, match=message) as caught:
        membership.router() if name == "router.json" else membership.engines()
    assert str(caught.value).isprintable()
    assert name in str(caught.value)
