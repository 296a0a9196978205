#!/usr/bin/env python3
"""`ddp_scaling resnet` with PyTorch: the same network, batch, optimizer and order of measurement under its own
DistributedDataParallel. Each rank is started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    ddp_resnet.py [rounds, default 5] [JSON file] [images, default 16] [edge, default 96]
"""
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def convolution(channels, out, size, stride):
    return nn.Sequential(nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.reduce = convolution(channels, width, 1, 1)
        self.middle = convolution(width, width, 3, stride)
        self.expand = convolution(width, width * 4, 1, 1)
        self.shortcut = convolution(channels, width * 4, 1, stride) if stride != 1 or channels != width * 4 else None

    def forward(self, x):
        y = torch.relu(self.reduce(x))
        y = torch.relu(self.middle(y))
        y = self.expand(y)
        return torch.relu(y.add_(x if self.shortcut is None else self.shortcut(x)))


class ResNet50(nn.Module):
    def __init__(self, classes=1000):
        super().__init__()
        layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = width = 64
        for stage, blocks in enumerate([3, 4, 6, 3]):
            for block in range(blocks):
                layers.append(Bottleneck(channels, width, 2 if stage > 0 and block == 0 else 1))
                channels = width * 4
            width *= 2
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(2048, classes)

    def forward(self, images):
        return self.head(self.features(images).mean((2, 3)))


class Training:
    def __init__(self, rank, shared, images, edge):
        torch.manual_seed(0)
        self.model = ResNet50()
        assert sum(parameter.numel() for parameter in self.model.parameters()) == 25_557_032
        torch.manual_seed(1 + rank)
        self.input, self.target = torch.randn(images, 3, edge, edge), torch.randint(1000, (images,))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.forward = nn.parallel.DistributedDataParallel(self.model) if shared else self.model

    def gradients(self):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.forward(self.input), self.target).backward()

    def step(self):
        self.gradients()
        self.optimizer.step()


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    images = int(sys.argv[3]) if len(sys.argv) > 3 else 16
    edge = int(sys.argv[4]) if len(sys.argv) > 4 else 96
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone, shared = (Training(rank, shared, images, edge) for shared in (False, True))
    for _ in range(2):
        alone.gradients()
        shared.gradients()
        for ours, own in zip(shared.model.parameters(), alone.model.parameters()):
            want = own.grad.clone()
            dist.all_reduce(want)
            want /= dist.get_world_size()
            assert (ours.grad - want).norm() <= 1e-6 * want.norm()

    ways = {"one": lambda: alone.step() if rank == 0 else None, "apart": alone.step, "ddp": shared.step}
    seconds = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 2):
        for name in names[turn % 3:] + names[:turn % 3]:
            start = time.perf_counter()
            dist.barrier()
            ways[name]()
            dist.barrier()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        result = {name: {"min": min(taken), "median": statistics.median(taken)} for name, taken in seconds.items()}
        result |= {"torch": torch.__version__, "images": images, "edge": edge}
        print(json.dumps(result))
        if len(sys.argv) > 2:
            with open(sys.argv[2], "w") as file:
                json.dump(result, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    main()
