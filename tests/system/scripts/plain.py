"""A script that is not Lightning: it prints, uses some memory and ends as told."""

import sys
import time

print("plain script begins")
for i in range(int(sys.argv[1])):
    print("line", i, flush=True)
    time.sleep(0.1)
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
