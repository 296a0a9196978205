#!/usr/bin/env python3
"""The model of docs/scaling.md: fits a link's latency and rate to what ddp_scaling.py measured (ddp_scaling.json), checks the
model against the measured steps, and predicts. Prints Markdown.

    scaling_model.py        `python3 -m doctest scaling_model.py` checks the formulas
"""
import json
import pathlib

RESULTS = pathlib.Path(__file__).resolve().parent / "ddp_scaling.json"
MB = 1e6


def all_reduce(ranks, size, alpha, beta):
    """Seconds of a ring's all_reduce of `size` bytes: 2 (N - 1) messages one after the other, of 1/N each.

    >>> all_reduce(1, 8e6, 1e-3, 1e-9)
    0.0
    >>> round(all_reduce(2, 8e6, 1e-3, 1e-9), 9), round(all_reduce(4, 8e6, 1e-3, 1e-9), 9)
    (0.01, 0.018)
    """
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


def step(ranks, compute, buckets, alpha, beta):
    """Seconds of a step: buckets, (bytes, ready after seconds), travel one after the other from when they are ready; what
    `compute` has left after the last one is ready, the optimizer, waits for all.

    >>> round(step(1, 1.0, [(1e6, 0.5), (1e6, 0.9)], 0, 1e-7), 9)
    1.0
    >>> round(step(2, 1.0, [(1e6, 0.5), (1e6, 0.9)], 0, 1e-7), 9)    # 0.1 s each: the first is hidden, the second is not
    1.1
    >>> round(step(2, 1.0, [(1e6, 0.5), (1e6, 0.9)], 0, 1e-6), 9)    # 1 s each: both wait for the link
    2.6
    """
    end = 0
    for size, ready in buckets:
        end = max(ready, end) + all_reduce(ranks, size, alpha, beta)
    return end + compute - buckets[-1][1]


def fit(points, ranks=2):
    """alpha and beta of the least sum of squared relative errors of (bytes, seconds, …).

    >>> [round(x, 12) for x in fit([(n, all_reduce(2, n, 5e-5, 8e-9)) for n in (4e3, 1e6, 1e8)])]
    [5e-05, 8e-09]
    """
    rows = [(2 * (ranks - 1) / t, 2 * (ranks - 1) / ranks * n / t) for n, t, *_ in points]
    aa, ab, bb = (sum(f(x, y) for x, y in rows) for f in (lambda x, y: x * x, lambda x, y: x * y, lambda x, y: y * y))
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    det = aa * bb - ab * ab
    return (a * bb - b * ab) / det, (aa * b - ab * a) / det


def table(head, rows):
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


def uniform(size, compute, cap=25 * 2**20, bytes_each=4):
    """Buckets of a backward that takes the last two thirds of `compute` and makes its gradients at a constant pace.

    >>> uniform(60e6, 3.0, 25e6)
    [(25000000.0, 1.8333333333333335), (25000000.0, 2.666666666666667), (10000000.0, 3.0)]
    """
    buckets, done = [], 0
    while done < size:
        part = min(cap, size - done)
        done += part
        buckets.append((float(part), compute / 3 + compute * 2 / 3 * done / size))
    return buckets


def profile(run):
    """The smallest measured compute, and when in it the buckets are ready; without communication."""
    compute = run["silent"]["min"]
    return compute, [(size, ready * compute / run["silent"]["median"]) for size, ready in run["buckets"]]


def check(results, links):
    rows = []

    def compare(name, compute, predicted, measured):
        rows.append((name, f"{compute:.3f}", f"{predicted:.3f}", f"{measured:.3f}", f"{predicted / measured - 1:+.0%}"))

    for link, run in {"loopback": results["peers"]["ours"], **results["throttled"]}.items():
        compute, buckets = profile(run)
        compare(f"ResNet-50, fp32, {link}", compute, step(2, compute, buckets, *links[link]), run["ddp"]["min"])
    seconds = results["wire"]["1 Gbit/s"]["seconds"]
    for name, width in (("fp32", 4), ("fp16", 2), ("bf16", 2)):
        compute = seconds["nothing"]["min"]
        size = 4 * (2048 * 2048 + 2048) * width
        compare(f"4 Linear(2048), {name}, 1 Gbit/s, as if nothing overlapped", compute,
                compute + all_reduce(2, size, *links["1 Gbit/s"]), seconds[name]["min"])
    table(["step of two ranks", "compute, s", "modelled, s", "measured, s", "error"], rows)


def predict(results, alpha):
    whole, buckets = profile(results["peers"]["ours"])
    shape = [(size, ready / whole) for size, ready in buckets]
    cpu = results["peers"]["ours"]["apart"]["min"] / results["peers"]["images"] * 32

    def resnet(compute, width, _):
        return [(size * width / 4, ready * compute) for size, ready in shape]

    def bert(compute, width, cap):
        # The cap counts bytes before they are converted.
        return [(size * width / 4, ready) for size, ready in uniform(340e6 * 4, compute, cap * 2**20)]

    ranks = [2, 8, 64, 256, 1024]
    rows = []
    for name, compute, buckets in ((f"ResNet-50, {cpu:.1f} s (this CPU, 32 images)", cpu, resnet), ("ResNet-50, 0.1 s", 0.1, resnet),
                                   ("BERT-large, 0.5 s", 0.5, bert)):
        for gigabits in (10, 100):
            for width in (4, 2):
                for cap in (25, 400) if buckets is bert else (25,):
                    beta = 8 / (gigabits * 1e9 * 0.94)
                    efficiency = [compute / step(n, compute, buckets(compute, width, cap), alpha, beta) for n in ranks]
                    rows.append((name, f"{gigabits} Gbit/s", "fp32" if width == 4 else "16 bits", cap, *(f"{e:.0%}" for e in efficiency)))
    table(["model, compute of a step", "link", "gradients", "bucket_cap_mb", *(f"N = {n}" for n in ranks)], rows)


def main():
    results = json.loads(RESULTS.read_text())
    links = {name: fit(run["points"]) for name, run in results["link"].items()}
    table(["link", "alpha, µs", "1 / beta, Gbit/s"],
          [(name, f"{alpha * 1e6:.0f}", f"{8e-9 / beta:.2f}") for name, (alpha, beta) in links.items()])
    check(results, links)
    predict(results, links["no limit"][0])


if __name__ == "__main__":
    main()
