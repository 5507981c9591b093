"""Numerics and step times of the single-device engines, torch `local` and JAX `mpmd`, on the GPU that is there.

Run by `make gpu-check`; takes less than 8 minutes. Each backend runs in its own process. Exit status: 0 when all that
could be checked agrees, or when there is no GPU (which it says); 1 otherwise.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROBES = {
    "torch": "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')",
    "jax": "import jax; print(next((d.device_kind for d in jax.devices() if d.platform == 'gpu'), ''))",
}
ENGINES = {"torch": ("local", "cuda"), "jax": ("mpmd", "gpu")}
LIMIT_SECONDS = 220.0
GRADIENT_TOLERANCE = 1e-4
"""Against the unpipelined framework on the same GPU: other kernels sum in other orders than on the CPU."""


def found(backend: str) -> str:
    """The GPU that a framework sees, or nothing."""
    command = [sys.executable, "-c", PROBES[backend]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip()


def check(backend: str) -> bool:
    """Compare one backend's engine with its unpipelined framework; whether it agrees."""
    engine, device = ENGINES[backend]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        command = [
            *(sys.executable, "-m", "plait.cli", "compare", "llama", "--config", "small"),
            *("--frontend", "torch" if backend == "torch" else "flax", "--backend", backend),
            *("--engine", engine, "--device", device, "--schedule", "1f1b,zb-h1"),
            *("--ranks", "2", "--microbatches", "8", "--steps", "5", "--json", str(figures)),
        ]
        try:
            done = subprocess.run(command, timeout=LIMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            print(f"{backend}: not done in {LIMIT_SECONDS:.0f} s")
            return False
        if done.returncode:
            return False
        rows = json.loads(figures.read_text())["rows"]
    errors = [row["max_grad_error"] for row in rows]
    print(f"{backend}: largest gradient error {max(errors):.2e}, allowed {GRADIENT_TOLERANCE:.0e}")
    return len(rows) == 2 and max(errors) <= GRADIENT_TOLERANCE


def main() -> int:
    """Check each framework that sees a GPU."""
    gpus = {backend: found(backend) for backend in PROBES}
    for backend, gpu in gpus.items():
        print(f"{backend}: {gpu or 'sees no GPU here; nothing is checked'}")
    results = [check(backend) for backend, gpu in gpus.items() if gpu]
    if not results:
        print("No GPU: this check did not run.")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
