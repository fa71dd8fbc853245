"""Announcements of engines: what is none is left out, and told with the file and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.checksums import write_sealed_json
from pipeline.data.membership import Member, Membership
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
        ("router.json", dict(url=None), "url: Input should be a valid string"),
    ],
)
def test_announcements_that_cannot_be(
    tmp_path: Path, name: str, data: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_sealed_json(tmp_path / name, data)
    membership = Membership(tmp_path)
    membership.announce(Member(2, "http://b:1"))
    assert membership.router() is None
    assert [member.index for member in membership.engines()] == [2]
    [told] = caplog.messages
    assert message in told
    assert told.isprintable()
    assert name in told


@pytest.mark.parametrize("index", [65535, 9999999999999])
def test_an_index_that_no_batch_can_hold_is_refused(tmp_path: Path, index: int) -> None:
    Membership(tmp_path).announce(Member(index, "http://a:1"))
    with pytest.raises(StoreError, match=rf"{index}\.json is engine {index}, expected at most 65534; remove it"):
        Membership(tmp_path).engines()
