"""Checksums of small files, arrays, zips and folders: every flipped bit is found, and headers allocate nothing."""

from __future__ import annotations

import io
import json
import subprocess
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.checksums import (
    CHECKSUMS,
    create_sealed,
    list_checksums,
    read_sealed,
    read_sealed_array,
    read_sealed_json,
    remove_listed,
    seal,
    trailer_of,
    unseal,
    verify_folder,
    write_sealed,
    write_sealed_array,
    write_sealed_json,
)
from pipeline.data.zarr_zip import open_zarr_zip, write_zarr_zip
from pipeline.errors import StoreError
from tests.support.examples import profile
from tests.support.files import sealed_zip


def flipped(data: bytes, every: int = 1) -> Iterator[bytes]:
    """`data` with each of its bits, or one of `every`, flipped."""
    for place in range(0, 8 * len(data), every):
        byte, bit = divmod(place, 8)
        yield data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :]


TEXTS = ['{"url": "http://é", "n": 2}\n', "{}\n", '{\n "a": {"crc32": "00000000"}\n}\n', "12\n", "a: 1\nb: {}\n", "\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_each_flipped_bit_of_a_sealed_text_is_found(text: str) -> None:
    sealed = seal(text).encode()
    assert unseal(sealed) == text
    for damaged in flipped(sealed):
        with pytest.raises(ValueError, match=r"checksum|utf-8"):
            unseal(damaged)
    for length in range(len(sealed)):
        with pytest.raises(ValueError, match=r"checksum|utf-8"):
            unseal(sealed[:length])


@given(st.text(st.characters(codec="utf-8")), st.dictionaries(st.text(), st.integers() | st.text()))
def test_whatever_is_sealed_comes_back_and_stays_what_it_was(text: str, data: dict[str, int | str]) -> None:
    assert unseal(seal(text + "\n").encode()) == text + "\n"
    line = json.dumps(data) + "\n"
    assert unseal(seal(line).encode()) == line
    others = {key: value for key, value in json.loads(seal(line)).items() if key != "crc32"}
    assert others == {key: value for key, value in data.items() if key != "crc32"}
    assert yaml.safe_load(seal("a: 1\n")) == {"a": 1}, "YAML takes it for a comment"


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "PUBLISHED"
    write_sealed(path, "12\n")
    path.write_text(path.read_text().replace("12\n", "13\n"))
    with pytest.raises(StoreError, match=r"PUBLISHED is damaged \(its checksum differs\); start anew"):
        read_sealed(path, "start anew")
    with pytest.raises(FileExistsError):
        create_sealed(path, "14\n")
    write_sealed(path, "[1]\n")
    with pytest.raises(StoreError, match="holds no JSON object"):
        read_sealed_json(path, "start anew")
    write_sealed_json(path, dict(a=1))
    assert read_sealed_json(path, "") == dict(a=1)


def test_each_flipped_bit_of_an_array_is_found_and_numpy_reads_it(tmp_path: Path) -> None:
    path, values = tmp_path / "000012.npy", np.asarray([-0.5, 0.0, -3.25], np.float32)
    write_sealed_array(path, values)
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), values)
    found = read_sealed_array(path, "")
    assert found is not None
    np.testing.assert_array_equal(found, values)
    whole = path.read_bytes()
    for damaged in flipped(whole):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"000012\.npy is damaged \(its checksum differs: it was changed"):
            read_sealed_array(path, "")


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(2, 3)", "(-6,)"])
def test_a_header_of_an_array_that_claims_more_than_there_is_allocates_nothing(tmp_path: Path, shape: str) -> None:
    memory = io.BytesIO()
    np.save(memory, np.zeros(6, np.float32))
    claimed = memory.getvalue().replace(b"(6,), }" + b" " * len(shape), f"{shape}, }}".encode() + b" " * 4)
    path = tmp_path / "000012.npy"
    path.write_bytes(claimed + trailer_of(zlib.crc32(claimed)))
    with pytest.raises(StoreError, match=r"000012\.npy is damaged"):
        read_sealed_array(path, "")


def arrays_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.hypothesis
def test_each_flipped_bit_of_a_zip_is_found(tmp_path: Path) -> None:
    """One of five every day."""
    path = tmp_path / "a.zarr.zip"
    with path.open("wb") as file:
        write_zarr_zip(file, {"index": 3}, {"tokens": np.arange(4, dtype=np.int32)})
    found = open_zarr_zip(path)
    assert found.rows("tokens").tolist() == [0, 1, 2, 3]
    for damaged in flipped(path.read_bytes(), every=1 if profile() == "thorough" else 5):
        path.write_bytes(damaged)
        with pytest.raises((ValueError, OSError, zipfile.BadZipFile, KeyError, NotImplementedError)):
            open_zarr_zip(path)


def test_metadata_of_another_codec_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with path.open("wb") as file:
        write_zarr_zip(file, {}, {"tokens": np.arange(4, dtype=np.int32)})
    members = arrays_of(path)
    members["tokens/zarr.json"] = members["tokens/zarr.json"].replace(b'"zstd"', b'"gzip"')
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    path.write_bytes(sealed_zip(path.read_bytes()))
    with pytest.raises(ValueError, match="codecs"):
        open_zarr_zip(path)


def test_a_folder_is_compared_with_its_list_which_sha256sum_reads(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    list_checksums(tmp_path)
    verify_folder(tmp_path, "")
    subprocess.run(["sha256sum", "--check", "--strict", CHECKSUMS], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "model.safetensors").write_text("model.safetensorz")
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged .* remove it"):
        verify_folder(tmp_path, "remove it")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StoreError, match=r"model\.safetensors is missing"):
        verify_folder(tmp_path, "remove it")
    (tmp_path / CHECKSUMS).unlink()
    verify_folder(tmp_path, "", required=False)
    write_sealed(tmp_path / CHECKSUMS, f"{'0' * 64}  ../x\n")
    with pytest.raises(StoreError, match="names files outside"):
        verify_folder(tmp_path, "")


def test_a_file_leaves_a_folder_with_its_line_in_the_list(tmp_path: Path) -> None:
    remove_listed(tmp_path / "nothing", "a")
    for name in ("config.json", "manifest.json"):
        (tmp_path / name).write_text(name)
    list_checksums(tmp_path)
    (tmp_path / "manifest.json").unlink()  # as one that was killed then left it
    remove_listed(tmp_path, "manifest.json")
    verify_folder(tmp_path, "")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", CHECKSUMS}
    (tmp_path / CHECKSUMS).write_text("damaged")
    remove_listed(tmp_path, "config.json")
    assert [path.name for path in tmp_path.iterdir()] == [CHECKSUMS]
