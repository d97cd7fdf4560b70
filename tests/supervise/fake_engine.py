"""``fake_engine.py N ...`` starts fake ranks and ends with the first that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

RANK = Path(__file__).with_name("fake_rank.py")


def main() -> int:
    count, *rest = sys.argv[1:]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), "--rank", str(rank), "--ranks", count, *rest],
            env={**os.environ, "RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(int(count))
    ]
    print("engine begins", flush=True)
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed:
            for rank in ranks:
                rank.kill()
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
