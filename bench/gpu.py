"""What one GPU does with covey, in under ten minutes: `python bench/gpu.py`.

Four parts: `correctness` of every layout and kernel against plain padded rows, `decode` and `training` speed
beside the limits that are measured on the same device, and whole GRPO `steps`. Weights are random and nothing
is fetched. On a CPU `python bench/gpu.py --small` runs tiny versions of all of it in under a minute. Exits
with 1 where a result is not within its limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from on_gpu.correct import correctness
from on_gpu.decode import decode
from on_gpu.machine import say
from on_gpu.steps import steps
from on_gpu.training import training

PARTS = ("correctness", "decode", "training", "steps")


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not arguments.small and not torch.cuda.is_available():
        parser.error("there is no GPU here; --small runs tiny versions on the CPU")
    transformers.logging.set_verbosity_error()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    say(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    began = time.perf_counter()
    passed = True
    for part in arguments.parts or PARTS:
        say()
        match part:
            case "correctness":
                passed = all(f.passed for f in correctness(arguments.small))
            case "decode":
                decode(arguments.small)
            case "training":
                training(arguments.small)
            case "steps":
                steps(arguments.small, arguments.trl)
    say(f"\n{'passed' if passed else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
