"""Actions simulated a second.

    python benchmarks/schedule_speed.py

Simulates 1F1B of 8 ranks by 8,192 microbatches and of 1,024 ranks by 4,096 microbatches (8.4 million actions), and
exits with an error below a million actions a second.
"""

import sys
import time

from plait.core_ir.schedule import Times, build

LEAST = 1e6
TIMES = Times(f=1.0, i=1.1, w=0.9, comm=0.05)


def main() -> int:
    slow = False
    for num_ranks, num_microbatches in ((8, 8192), (1024, 4096)):
        begin = time.process_time()
        schedule = build("1f1b", num_ranks, num_microbatches)
        built = time.process_time()
        timeline = schedule.simulate(TIMES)
        simulated = time.process_time()
        rate = schedule.num_actions / (simulated - built)
        slow |= rate < LEAST
        print(
            f"1f1b {num_ranks} x {num_microbatches}: {schedule.num_actions:,} actions,"
            f" built and validated in {built - begin:.2f} s, simulated in {simulated - built:.2f} s:"
            f" {rate / 1e6:.2f} million/s; makespan {timeline.makespan:.1f}"
        )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
