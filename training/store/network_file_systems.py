"""Which folders are on a network file system, by the kernel's list of mounts.

SQLite needs locks and shared memory between its processes. Network file systems provide them
unreliably or not at all, and what one machine writes may be visible to another one much later.
"""

from __future__ import annotations

import re
from pathlib import Path

_NETWORK = frozenset(
    """
    9p afs auristorfs beegfs beegfs_nodev ceph cifs coda fhgfs gfs2 glusterfs gpfs lustre mmfs ncpfs
    nfs nfs4 ocfs2 orangefs panfs prl_fs pvfs2 smb3 smbfs vboxsf virtiofs wekafs
    """.split()  # noqa: SIM905 - easier to read than a list of strings
)
_LOCAL_FUSE = frozenset({"fuse-overlayfs", "overlayfs", "lxcfs", "mergerfs", "ntfs-3g", "ntfs"})
"""Subtypes of FUSE that are backed by a disk of this machine. All others may be on a network."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


def network_file_system(folder: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that ``folder`` is on; None if it is on none.

    ``mounts`` is the text of ``/proc/self/mountinfo``.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
    kind = _type_at(folder.resolve(), mounts)
    if kind in _NETWORK:
        return kind
    if kind == "fuse" or kind.startswith("fuse."):
        return None if kind.removeprefix("fuse.") in _LOCAL_FUSE else kind
    return None


def _type_at(folder: Path, mounts: str) -> str:
    """Return the type of the file system that is mounted at ``folder`` or nearest above it."""
    found, depth = "", -1
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not source:
            continue
        point = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # Of several mounts at one point, the last one hides the others.
        if len(point.parts) >= depth and folder.is_relative_to(point):
            found, depth = source.split()[0], len(point.parts)
    return found
