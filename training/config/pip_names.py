"""Modules that have another name on the Python Package Index than in Python. Pure."""

from __future__ import annotations

DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "yaml": "pyyaml",
}
"""Module name to distribution name. ``training/rank/train_preset.py`` has a copy, because ranks
import nothing of this package."""

MODULES = {distribution: module for module, distribution in DISTRIBUTIONS.items()}
"""Distribution name to module name."""
