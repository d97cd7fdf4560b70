"""All loaders by name."""

from __future__ import annotations

from tests.rank.exactness.loaders import LOADERS as OF_SCRIPTS
from tests.rank.exactness.modules import FFCVS_OWN, MODULES, OF_FFCV

LOADERS = {loader.__name__: loader for loader in (*OF_SCRIPTS, *MODULES)}
WITHOUT_WORKERS = ("simple", *OF_FFCV, *FFCVS_OWN)
SHARES_BY_ITSELF = ("own", "stateful", *(module.__name__ for module in MODULES))
"""Their ranks share the data without Lightning's sampler."""
