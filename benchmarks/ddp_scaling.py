#!/usr/bin/env python3
"""Runs ddp_scaling side by side with PyTorch's DDP, and over links of a known rate (tools/hosts.py, which needs root).

    ddp_scaling.py full           ResNet-50, 16 images of 224 x 224 per rank, Semitone's and PyTorch's alternately; PYTHON is
                                  a Python with torch
    ddp_scaling.py peers          the same with images of 96 x 96: a step in which communication weighs more
    ddp_scaling.py small          with 4 of them: in which it weighs most
    ddp_scaling.py wire           bytes a step in fp32, fp16 and bf16, without a limit and at 1 Gbit/s
    ddp_scaling.py link           all_reduce over each link
    ddp_scaling.py throttled      ResNet-50 over 1 Gbit/s and 200 Mbit/s

Adds what it measured to benchmarks/ddp_scaling.json, from which scaling_model.py predicts. PROGRAM names the benchmark, by
default build/release/benchmarks/ddp_scaling. Nothing else should run on the machine.
"""
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))
from hosts import Hosts  # noqa: E402

PROGRAM = os.environ.get("PROGRAM", HERE.parent / "build/release/benchmarks/ddp_scaling")
PYTHON = os.environ.get("PYTHON", sys.executable)
RESULTS = HERE / "ddp_scaling.json"
PORT = 29650
RATES = {"no limit": None, "1 Gbit/s": "1gbit", "200 Mbit/s": "200mbit"}


def run(command, hosts=None, more=()):
    """Two ranks of a command, with the name of a JSON file and `more` appended; returns the contents of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "result.json"
        ranks = []
        for rank in range(2):
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1,
                     "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1", "MASTER_PORT": PORT}
            words = ["env", *(f"{name}={value}" for name, value in place.items()), *map(str, command), str(path), *map(str, more)]
            ranks.append(hosts[rank].start(words) if hosts else subprocess.Popen(words))
        if any([rank.wait() for rank in ranks]):
            sys.exit(f"{command[0]} failed")
        return json.loads(path.read_text())


def over(rate, *arguments):
    with Hosts(2, RATES[rate]) as hosts:
        return run([PROGRAM, *arguments], hosts)


def summary(runs):
    """The smallest minimum and the median of the medians of several runs."""
    return {way: {"min": min(one[way]["min"] for one in runs), "median": statistics.median(one[way]["median"] for one in runs)}
            for way in ("one", "apart", "ddp")}


def peers(images=16, edge=96, turns=2, rounds=3):
    ours, theirs = [], []
    for _ in range(turns):
        ours.append(run([PROGRAM, "resnet", rounds], more=[images, edge]))
        theirs.append(run([PYTHON, HERE / "peers/ddp_resnet.py", rounds], more=[images, edge]))
    result = {"images": images, "edge": edge, "ours": {**summary(ours), "silent": ours[0]["silent"], "buckets": ours[0]["buckets"]},
              "pytorch": {**summary(theirs), "torch": theirs[0]["torch"]}}
    for who in ("ours", "pytorch"):
        for kind in ("min", "median"):
            one, apart, ddp = (1e3 * result[who][way][kind] for way in ("one", "apart", "ddp"))
            print(f"{who:<8} {kind:<7} one {one:7.1f} ms  each on its own {apart:7.1f} ms  DDP {ddp:7.1f} ms  "
                  f"DDP/one {ddp / one:.3f}  DDP/own {ddp / apart:.3f}")
    return result


def wire():
    return {rate: over(rate, "wire", 20) for rate in ("no limit", "1 Gbit/s")}


def link():
    return {"loopback": run([PROGRAM, "link", 7]), **{rate: over(rate, "link", 5) for rate in RATES}}


def throttled():
    return {rate: over(rate, "resnet", 2) for rate in ("1 Gbit/s", "200 Mbit/s")}


KINDS = {"full": lambda: peers(edge=224), "peers": peers, "small": lambda: peers(4, turns=3),
         "wire": wire, "link": link, "throttled": throttled}


def main():
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for what in sys.argv[1:] or sys.exit(__doc__):
        results[what] = KINDS[what]()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
