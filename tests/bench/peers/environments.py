"""An environment for each peer: its own packages, and torch and Lightning of ltui's environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / "peers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A tool and the distributions that it is installed from."""

    name: str
    distributions: tuple[str, ...] = ()
    """Empty: it comes with Lightning, and runs in ltui's own environment."""


PEERS = (
    Peer(name="csv"),
    Peer(name="rich"),
    Peer(name="tensorboard", distributions=("tensorboard",)),
    Peer(name="wandb", distributions=("wandb",)),
    Peer(name="trackio", distributions=("trackio",)),
    Peer(name="traceml", distributions=("traceml-ai",)),
    Peer(name="nvitop", distributions=("nvitop",)),
)


def python_of(peer: Peer) -> str:
    """The interpreter of the peer's environment, which is made and filled if it is missing."""
    if not peer.distributions:
        return sys.executable
    folder = FOLDER / peer.name
    python = folder / "bin" / "python"
    ready = folder / ".installed"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *peer.distributions], check=True, stderr=subprocess.DEVNULL)
        (site,) = folder.glob("lib/python*/site-packages")
        # After the peer's own packages on sys.path, so that those keep their versions.
        (site / "ltui_environment.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        ready.touch()
    return str(python)


def version_of(peer: Peer) -> str:
    """The installed version, as the peer's environment reports it."""
    distribution = peer.distributions[0] if peer.distributions else "lightning"
    program = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run(
        [python_of(peer), "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
