"""A damaged ``.beton`` is recognised before anything is read from it, with the sample's number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ltui.training.data.ffcv.beton_file import ALLOCATION, HEADER, BetonError, BetonFile
from tests.data.conftest import PHOTOS, ltui, needs_ffcv

pytestmark = needs_ffcv


@pytest.fixture
def copy(beton: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(beton, tmp_path / "copy.beton"))


def add_empty_pages(path: Path, pages: int) -> None:
    """Insert pages before the allocation table."""
    file = BetonFile(path)
    header = np.fromfile(path, HEADER, 1)
    header["alloc_table_ptr"] += np.uint64(pages * file.page_size)
    with path.open("r+b") as out:
        out.write(header.tobytes())
        out.truncate(file.table_at)
        out.seek(int(header["alloc_table_ptr"][0]))
        out.write(file.allocations.tobytes())


def refusal(path: Path) -> str:
    with pytest.raises(BetonError) as caught:
        BetonFile(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    return said


@pytest.mark.slow
def test_what_it_holds(beton: Path, photos: Path) -> None:
    file = BetonFile(beton)
    assert file.samples == PHOTOS
    assert [field.name for field in file.fields] == ["image", "label"]
    assert file.metadata["f1"].tolist() == [n * 3 // PHOTOS for n in range(PHOTOS)]
    files = sorted(photos.rglob("*.jpg"))
    data = beton.read_bytes()
    for sample, path in enumerate(files):
        at, size = int(file.pointers(0)[sample]), int(file.sizes(0)[sample])
        assert data[at : at + size] == path.read_bytes()  # a JPEG is kept byte for byte


def test_it_may_be_cut_off_anywhere(beton: Path, copy: Path) -> None:
    whole = beton.stat().st_size
    for length in (0, 10, 1000, 3000, whole // 2, whole - ALLOCATION.itemsize, whole - 1):
        shutil.copy(beton, copy)
        with copy.open("r+b") as file:
            file.truncate(length)
        assert "cut off" in refusal(copy)


def test_one_that_was_never_finished(copy: Path) -> None:
    with copy.open("r+b") as file:
        file.seek(16)
        file.write(bytes(8))
    assert "was not completed" in refusal(copy)


def test_something_else(tmp_path: Path) -> None:
    path = tmp_path / "text.beton"
    path.write_text("no dataset\n" * 1000)
    assert "not a .beton file" in refusal(path)
    assert "can't be read" in refusal(tmp_path / "absent.beton")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ptr", 1 << 40, "points past the data"),
        ("ptr", 3, "points past the data"),
        ("size", 3 << 20, "is not within one page"),
        ("ptr", None, "has no image where 'image' should be"),
    ],
)
def test_a_pointer_that_leads_astray(copy: Path, field: str, value: int | None, said: str) -> None:
    add_empty_pages(copy, 2)  # so that a sample that is larger than a page ends before the table
    file = BetonFile(copy)
    rows = file.allocations.copy()
    bad = int(np.argmin(rows["ptr"]))
    sample = int(rows["sample_id"][bad])
    rows[field][bad] = rows[field][bad] + 1 if value is None else value
    with copy.open("r+b") as out:
        out.seek(file.table_at)
        out.write(rows.tobytes())
    text = refusal(copy)
    assert f"sample {sample} " in text
    assert said in text


def test_a_field_that_is_not_there(beton: Path) -> None:
    with pytest.raises(BetonError, match=r"no field 'mask'\. Its fields are: image, label"):
        BetonFile(beton).field_index("mask")


def test_the_command_tells_what_it_holds(beton: Path, tmp_path: Path) -> None:
    done = ltui("data", "info", str(beton), "--json", folder=tmp_path)
    said = json.loads(done.stdout)
    assert (said["samples"], said["bytes"]) == (PHOTOS, beton.stat().st_size)
    assert said["fields"][0]["width"][::2] == [70, 74]
    assert said["fields"][0]["jpeg"] == 1.0
    assert 0 < said["page_use"] <= 1
    assert "45" in ltui("data", "info", str(beton), folder=tmp_path).stdout


def test_samples_of_numbers_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    numbers = "class Numbers(list):\n    def __init__(self): super().__init__([(1, 0.5), (2, 1.5)])"
    (tmp_path / "my_numbers.py").write_text(numbers)
    done = ltui("data", "build", "my_numbers.Numbers", "-o", "x.beton", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert BetonFile(tmp_path / "x.beton").metadata["f0"].tolist() == [1, 2]
