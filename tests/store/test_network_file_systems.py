"""Which folders are on a network file system, by the text of the kernel's list of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ltui.training.store.history_place import network_file_system

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2
31 30 8:2 / /home/me/local rw - xfs /dev/sdb1 rw
32 21 0:50 / /scratch rw shared:9 master:1 - lustre 10.0.0.1@tcp:/fs rw,flock
33 21 0:51 / /with\\040space rw - cifs //server/share rw
34 21 0:52 / /object rw - fuse.juicefs JuiceFS:x rw
35 21 0:53 / /container rw - fuse.fuse-overlayfs fuse-overlayfs rw
36 21 0:54 / /hidden rw - nfs server:/a rw
37 36 0:55 / /hidden rw - tmpfs tmpfs rw
38 21 0:56 / /cloud rw - fuse some rw
broken line
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/me/.local/share/ltui", "nfs4"),
        ("/home/me/local/ltui", None),
        ("/homework", None),
        ("/scratch/me", "lustre"),
        ("/with space/ltui", "cifs"),
        ("/object/a", "fuse.juicefs"),
        ("/container/a", None),
        ("/hidden/a", None),
        ("/cloud", "fuse"),
        ("/tmp", None),
    ],
)
def test_the_mount_nearest_above_counts(folder: str, kind: str | None) -> None:
    assert network_file_system(Path(folder), MOUNTS) == kind


def test_a_link_leads_to_the_file_system_of_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/scratch/me")
    assert network_file_system(link, MOUNTS) == "lustre"


def test_the_mounts_of_this_machine_can_be_read(tmp_path: Path) -> None:
    assert network_file_system(Path("/proc")) is None
    assert network_file_system(tmp_path, "") is None
