"""``.beton`` files and ``ltui data``: a damaged one is recognised before anything is read from it,
with the sample's number. What can't be built or decoded is named, and leaves no file."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from ltui.training.data.ffcv.beton_file import ALLOCATION, HEADER, BetonError, BetonFile
from ltui.training.data.ffcv.beton_sources import ImageFolder
from ltui.training.data.ffcv.torch_dataset import verify
from tests.data.conftest import PHOTOS, damage, ltui, needs_ffcv
from tests.json_schema import mistakes
from tests.ltui_command import answer

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


def test_one_that_was_never_finished_and_something_else(copy: Path, tmp_path: Path) -> None:
    with copy.open("r+b") as file:
        file.seek(16)
        file.write(bytes(8))
    assert "was not completed" in refusal(copy)
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
    said = answer(done.stdout)
    schema = json.loads(ltui("schema", "data", "info", folder=tmp_path).stdout)
    assert mistakes(said, schema["data"]["data info"], schema) == []
    assert (said["samples"], said["bytes"]) == (PHOTOS, beton.stat().st_size)
    assert said["fields"][0]["width"][::2] == [70, 74]
    assert said["fields"][0]["jpeg"] == 1.0
    assert 0 < said["page_use"] <= 1
    assert "45" in ltui("data", "info", str(beton), folder=tmp_path).stdout


def built(folder: Path, source: str) -> tuple[int, str, set[str]]:
    """Build ``x.beton``. Return the exit code, what is said, and the files then in the folder."""
    done = ltui("data", "build", source, "-o", "x.beton", folder=folder)
    assert done.returncode == 0 or done.stdout == ""
    return done.returncode, done.stderr, {p.name for p in folder.iterdir()} - {"home"}


@pytest.mark.slow
def test_samples_of_numbers_alone(tmp_path: Path) -> None:
    numbers = "class Numbers(list):\n    def __init__(self): super().__init__([(1, 0.5), (2, 1.5)])"
    (tmp_path / "my_numbers.py").write_text(numbers)
    code, said, _ = built(tmp_path, "my_numbers.Numbers")
    assert code == 0, said
    assert BetonFile(tmp_path / "x.beton").metadata["f0"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("json.JSONDecoder", "has no __len__ and __getitem__"),
        ("no_such_module.Data", "'no_such_module' can't be imported"),
        ("no/such/folder", "there is no such folder"),
    ],
)
def test_what_can_not_be_built(source: str, said: str, tmp_path: Path) -> None:
    code, error, files = built(tmp_path, source)
    assert (code, error.count("\n"), files) == (2, 1, set())
    assert said in error


def test_a_file_that_is_no_image(photos: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    (folder / "b" / "torn.jpg").write_bytes((folder / "b" / "001.jpg").read_bytes()[:300])
    code, error, files = built(tmp_path, "photos")
    assert (code, files) == (2, {"photos"})
    assert "sample 30 (b/torn.jpg)" in error
    assert "--skip-bad" in error


def test_a_damaged_image_is_named(copy: Path, tmp_path: Path) -> None:
    damage(copy, 23)
    done = ltui("data", "verify", "copy.beton", folder=tmp_path)
    assert done.returncode == 2
    assert "copy.beton: sample 23: the image in 'image' is damaged" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_is_verified_by_ffcvs_decoder_without_importing_ffcv(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another package that FFCV needs may be missing."""
    for module in ("ffcv.libffcv", "ltui.training.data.ffcv.beton_writer"):
        monkeypatch.setitem(sys.modules, module, None)
    damage(copy, 23)
    assert [sample for sample, _ in verify(copy, 1, lambda *_: None)] == [23]


def test_a_folder_is_listed_in_the_order_of_its_paths_and_links_are_not_followed(
    tmp_path: Path,
) -> None:
    names = ["a/x/1.jpg", "a/x-y/2.JPG", "a/z.png", "b/.hidden/3.jpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    folder = ImageFolder(tmp_path)
    assert [folder.name_of(index) for index in range(len(folder))] == names
    assert [label for _, label in folder.samples] == [0, 0, 0, 1]
