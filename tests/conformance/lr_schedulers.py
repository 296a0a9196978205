#!/usr/bin/env python3
"""Writes data/lr_schedulers.json: the learning rates of torch.optim.lr_scheduler before each step.

lr_schedulers.py JSON
"""

import json
import sys
import warnings
from collections.abc import Callable

import torch
from torch.optim import lr_scheduler as lrs

warnings.simplefilter("ignore")  # "call optimizer.step() first", which has no effect on the rates
BASE_LRS = [0.1, 0.0125]

# Every schedule of semitone/optim/lr_schedule.h, by the options of torch.optim. CosineAnnealingLR ends at T_max,
# beyond which the two differ.
CASES: list[tuple[str, dict, int]] = [
    ("LinearLR", {"total_iters": 5, "start_factor": 1 / 3, "end_factor": 1.0}, 9),
    ("LinearLR", {"total_iters": 7, "start_factor": 0.001, "end_factor": 0.9}, 9),
    ("LinearLR", {"total_iters": 1, "start_factor": 0.5, "end_factor": 1.0}, 3),
    ("CosineAnnealingLR", {"T_max": 10, "eta_min": 0.0}, 10),
    ("CosineAnnealingLR", {"T_max": 37, "eta_min": 0.01}, 37),
    ("PolynomialLR", {"total_iters": 8, "power": 1.0}, 11),
    ("PolynomialLR", {"total_iters": 8, "power": 2.0}, 11),
    ("PolynomialLR", {"total_iters": 9, "power": 0.9}, 11),
    ("StepLR", {"step_size": 3, "gamma": 0.1}, 13),
    ("MultiStepLR", {"milestones": [2, 3, 8], "gamma": 0.5}, 12),
    ("OneCycleLR", {"total_steps": 20, "pct_start": 0.3, "anneal_strategy": "cos", "div_factor": 25.0,
                    "final_div_factor": 1e4, "three_phase": False}, 19),
    ("OneCycleLR", {"total_steps": 23, "pct_start": 0.45, "anneal_strategy": "linear", "div_factor": 10.0,
                    "final_div_factor": 100.0, "three_phase": False}, 22),
    ("OneCycleLR", {"total_steps": 30, "pct_start": 0.25, "anneal_strategy": "cos", "div_factor": 5.0,
                    "final_div_factor": 50.0, "three_phase": True}, 29),
    ("OneCycleLR", {"total_steps": 11, "pct_start": 0.0, "anneal_strategy": "linear", "div_factor": 25.0,
                    "final_div_factor": 1e4, "three_phase": False}, 10),
    ("OneCycleLR", {"total_steps": 11, "pct_start": 0.5, "anneal_strategy": "linear", "div_factor": 25.0,
                    "final_div_factor": 1e4, "three_phase": True}, 10),
    ("SequentialLR", {"milestones": [4], "schedules": [
        ["LinearLR", {"total_iters": 4, "start_factor": 0.01, "end_factor": 1.0}],
        ["CosineAnnealingLR", {"T_max": 12, "eta_min": 0.001}]]}, 16),
    ("SequentialLR", {"milestones": [3, 9], "schedules": [
        ["LinearLR", {"total_iters": 5, "start_factor": 0.25, "end_factor": 1.0}],
        ["StepLR", {"step_size": 2, "gamma": 0.5}],
        ["PolynomialLR", {"total_iters": 6, "power": 2.0}]]}, 18),
]


def make(name: str, options: dict, optimizer: torch.optim.Optimizer) -> lrs.LRScheduler:
    if name == "SequentialLR":
        parts = [make(part, own, optimizer) for part, own in options["schedules"]]
        return lrs.SequentialLR(optimizer, parts, options["milestones"])
    build: Callable[..., lrs.LRScheduler] = getattr(lrs, name)
    if name == "OneCycleLR":
        return build(optimizer, max_lr=BASE_LRS, cycle_momentum=False, **options)
    return build(optimizer, **options)


def rates(name: str, options: dict, steps: int) -> list[list[float]]:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in BASE_LRS]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = make(name, options, optimizer)
    result = []
    for _ in range(steps + 1):
        result.append([group["lr"] for group in optimizer.param_groups])
        if len(result) <= steps:
            scheduler.step()
    return result


def main() -> None:
    cases = [
        {"schedule": name, "options": options, "lrs": rates(name, options, steps)}
        for name, options, steps in CASES
    ]
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write(f'{{\n "schema": "lr_schedulers/1",\n "peer": "PyTorch {torch.__version__}",\n'
                   f' "base_lrs": {json.dumps(BASE_LRS)},\n "cases": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
