"""The common part of the peers of `semitone bench`: its flags, its rates, and how they are driven step by step.

A training has step(), which returns the loss, and lasting_mb(), the memory that stays between steps by kind. With peak_mb() it also says
the largest memory of all tensors on its device, or None where it does not know; with was_skipped(), whether the loss scale skipped the last
step, which is asked in the check only.
"""
import argparse
import json
import math
import resource
import sys
import time

MOMENTUM = 0.9
WEIGHT_DECAY = 0.01
MOST_SKIPS = 40
MASKED = 0.15
DROPOUT = 0.1
RESIDUAL_GAIN = 0.2  # initial weight of the last BatchNorm of each block of ResNet-50
CLASSES = {"mnist": 10, "resnet50": 1000}
RATES = {"mnist": 0.01, "resnet50": 0.001, "encoder": 1e-4}
BATCH_SIZES = {"mnist": 100, "resnet50": 16, "encoder": 8}
SIZES = {"--image-size": 224, "--length": 128, "--layers": 4, "--width": 1024, "--heads": 16, "--vocabulary": 18000}


def parse(modes):
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=RATES)
    parser.add_argument("--mode", choices=modes, required=True)
    parser.add_argument("--device", default="cpu")
    for flag, default in {"--threads": 0, "--batch-size": 0, "--seed": 0, "--check-steps": 4, "--warm-up": 2, **SIZES}.items():
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--dropout", type=float, default=DROPOUT)
    parser.add_argument("--json")
    options = parser.parse_args()
    options.batch_size = options.batch_size or BATCH_SIZES[options.workload]
    options.ffn = 4 * options.width
    options.max_positions = max(512, options.length)
    return options


def step(training):
    loss = training.step()
    if not math.isfinite(loss):
        sys.exit(f"expected a finite loss, got {loss}")
    return loss


def first_losses(training, count):
    """Of steps that a loss scale does not skip."""
    losses, skips = [], 0
    while len(losses) < count:
        loss = step(training)
        if hasattr(training, "was_skipped") and training.was_skipped():
            skips += 1
            if skips > MOST_SKIPS:
                sys.exit(f"expected gradients that are finite at some loss scale, got none in {skips} steps")
        else:
            losses.append(loss)
    return losses


def drive(options, make_training, versions):
    """Checks, warms up, and answers standard input to its end."""
    losses = first_losses(make_training(0.0), options.check_steps)
    if not losses[-1] < losses[0]:
        sys.exit(f"expected losses that fall, got {losses}")
    training = make_training(options.dropout)
    for _ in range(options.warm_up):
        step(training)
    print("ready", flush=True)
    for line in sys.stdin:
        word, count = line.split()
        if word != "step":
            sys.exit(f"expected 'step N', got {line!r}")
        start = time.perf_counter()
        for _ in range(int(count)):
            loss = step(training)
        print(json.dumps({"steps": int(count), "seconds": time.perf_counter() - start, "loss": loss}), flush=True)
    if options.json:
        result = {"workload": options.workload, "mode": options.mode, "check_losses": losses, "lasting_mb": training.lasting_mb(),
                  "peak_mb": training.peak_mb() if hasattr(training, "peak_mb") else None,
                  "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  "versions": {**versions, "python": sys.version.split()[0]}}
        with open(options.json, "w") as file:
            json.dump(result, file)
