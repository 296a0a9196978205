#!/usr/bin/env python3
"""What a device can do, by PyTorch: bandwidth of a copy, and speed of matrix products, as the standards for other measurements.

    device_facts.py --device cuda --json FILE [--small]

Each number is the median of repeated runs on random data, timed by the host around a run that ends with a wait for the device.
"""
import argparse
import json
import statistics
import time

import torch

ROUNDS = 10
CALLS = 10  # in a round, so that launching is no part of the time
COPY_BYTES = 2**30
EDGE = 8192
PRODUCTS = {"fp32": (torch.float32, False), "tf32": (torch.float32, True), "fp16": (torch.float16, False), "bf16": (torch.bfloat16, False)}


def seconds_of(work, device):
    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    taken = []
    for _ in range(ROUNDS):
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            work()
        wait()
        taken.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(taken)


def copy_bandwidth(device, size):
    """GB/s, counting the bytes read and those written."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device) / 1e9


def product_speed(device, dtype, tf32, edge):
    """TFLOP/s of a product of square matrices."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    return 2 * edge**3 / seconds_of(lambda: a @ b, device) / 1e12


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--json", required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    result = {"torch": torch.__version__, "cuda": torch.version.cuda,
              "copy_gb_per_s": copy_bandwidth(device, 2**24 if options.small else COPY_BYTES),
              "tflop_per_s": {name: product_speed(device, dtype, tf32, 128 if options.small else EDGE) for name, (dtype, tf32) in PRODUCTS.items()}}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        result |= {"name": facts.name, "multiprocessors": facts.multi_processor_count, "memory_mb": facts.total_memory / 2**20,
                   "cudnn": torch.backends.cudnn.version(), "nccl": list(torch.cuda.nccl.version())}
    with open(options.json, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
