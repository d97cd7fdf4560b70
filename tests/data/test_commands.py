"""``ltui data`` with what can't be built or decoded: named, exit code 2, and no file left."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ltui.training.data.ffcv.beton_file import BetonFile
from ltui.training.data.ffcv.beton_sources import ImageFolder
from ltui.training.data.ffcv.torch_dataset import verify
from tests.data.conftest import ltui, needs_ffcv

pytestmark = needs_ffcv


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("build", "x", "-o", "x.beton", "--page-size", "3"), "the page size must be 2, 4, 8"),
        (("build", "x", "-o", "nowhere/x.beton"), "the folder does not exist"),
        (("info", "absent.beton"), "absent.beton: it can't be read"),
        (("build", "json.JSONDecoder", "-o", "x.beton"), "has no __len__ and __getitem__"),
        (("build", "no_such_module.Data", "-o", "x.beton"), "'no_such_module' can't be imported"),
        (("build", "no/such/folder", "-o", "x.beton"), "there is no such folder"),
    ],
)
def test_what_can_not_be_done(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    done = ltui("data", *words, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["home"]


def test_a_file_that_is_no_image(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    (folder / "b" / "torn.jpg").write_bytes((folder / "b" / "001.jpg").read_bytes()[:300])
    done = ltui("data", "build", "photos", "-o", "x.beton", folder=tmp_path)
    assert done.returncode == 2
    assert "sample 30 (b/torn.jpg)" in done.stderr
    assert "--skip-bad" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "photos"]


def test_a_damaged_image_is_named(beton: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    damage(Path(shutil.copy(beton, tmp_path / "copy.beton")), 23)
    done = ltui("data", "verify", "copy.beton", folder=tmp_path)
    assert done.returncode == 2
    assert "copy.beton: sample 23: the image in 'image' is damaged" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_is_verified_by_ffcvs_decoder_without_importing_ffcv(
    beton: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another package that FFCV needs may be missing."""
    for module in ("ffcv.libffcv", "ltui.training.data.ffcv.beton_writer"):
        monkeypatch.setitem(sys.modules, module, None)
    copy = Path(shutil.copy(beton, tmp_path / "copy.beton"))
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


def damage(path: Path, sample: int) -> None:
    """Blanks the middle of a sample's JPEG."""
    file = BetonFile(path)
    at, size = int(file.pointers(0)[sample]), int(file.sizes(0)[sample])
    with path.open("r+b") as out:
        out.seek(at + size // 2)
        out.write(bytes(size // 3))
