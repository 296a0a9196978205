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
NORM_EPS = 1e-5  # of the decoder
ROPE_THETA = 10000.0
FFN_MULTIPLE = 256
RATES = {"mnist": 0.01, "resnet50": 0.001, "encoder": 1e-4, "decoder": 1e-4}
# Each has its own flag. The decoder has no dropout.
SIZES = {"mnist": {"batch_size": 100},
         "resnet50": {"batch_size": 16, "image_size": 224},
         "encoder": {"batch_size": 8, "length": 128, "layers": 4, "width": 1024, "heads": 16, "vocabulary": 18000},
         "decoder": {"batch_size": 4, "length": 512, "layers": 4, "width": 768, "heads": 12, "vocabulary": 18000}}


def parse(modes, workloads=tuple(SIZES)):
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=workloads)
    parser.add_argument("--mode", choices=modes, required=True)
    parser.add_argument("--device", default="cpu")
    for flag, default in {"--threads": 0, "--seed": 0, "--check-steps": 4, "--warm-up": 2}.items():
        parser.add_argument(flag, type=int, default=default)
    for name in {name for sizes in SIZES.values() for name in sizes}:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=0, help="0: the workload's default")
    parser.add_argument("--dropout", type=float, default=DROPOUT)
    parser.add_argument("--json")
    options = parser.parse_args()
    for name, default in SIZES[options.workload].items():
        setattr(options, name, getattr(options, name) or default)
    options.max_positions = max(512, options.length)
    # BERT's width of the feed-forward part, or Llama's.
    options.ffn = (4 * options.width if options.workload == "encoder"
                   else -(-(8 * options.width // 3) // FFN_MULTIPLE) * FFN_MULTIPLE)
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
