"""`heedful train` by processes that Ray Train starts, on one machine or on a cluster: the same loop, the same options.

pip install 'heedful[torch]' 'ray[train]'
python recipes/ray_train.py --workers 2 -- --data examples/moby_dick.txt --out runs/ray --layers 1 --context 64

Ray finds the machines, starts the processes and says who is who; all else is docs/distributed.md. `--out` has to be a
folder that all machines see, and so has `--data`.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings: dict[str, Any]) -> None:
    """In each of Ray's workers: the run's own process beside it, as torchrun would start it. It wants signals, which
    only a main thread has, and a port of its own to meet the others at. Who is who, Ray has put in the environment."""
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    environment = {**os.environ, "MASTER_PORT": str(port[0])}
    command = [sys.executable, "-m", "heedful.train", *settings["arguments"]]
    subprocess.run(command, env=environment, cwd=settings["folder"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="of a worker")
    parser.add_argument("--address", help="of a Ray cluster; default: this machine alone")
    parser.add_argument("arguments", nargs="*", help="of `heedful train`, after --")
    args = parser.parse_args()
    ray.init(address=args.address, **({} if args.address else {"include_dashboard": False}))
    with tempfile.TemporaryDirectory() as notes:
        trainer = TorchTrainer(
            train,
            train_loop_config={"arguments": args.arguments, "folder": str(Path.cwd())},
            torch_config=TorchConfig(backend="gloo", init_method="env"),
            scaling_config=ScalingConfig(num_workers=args.workers, resources_per_worker={"CPU": args.cpus}),
            run_config=RunConfig(name="heedful", storage_path=notes),
        )
        trainer.fit()


if __name__ == "__main__":
    main()
