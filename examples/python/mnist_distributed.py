#!/usr/bin/env python3
"""The program ../mnist_distributed.cpp in PyTorch. Mixed precision is torch.autocast, since Apex has removed O2.

    mnist_distributed.py [-n MACHINES] [-g GPUS] [-nr NUMBER] [--epochs N] [--images N] [--data DIR]
    MASTER_ADDR=10.0.0.1 MASTER_PORT=8888 mnist_distributed.py -n 2 -g 4 -nr 0
"""
import argparse
import gzip
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load(folder, split):
    def read(name, skip):
        with gzip.open(f"{folder}/{split}-{name}.gz") as file:
            return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)
    return TensorDataset(read("images-idx3-ubyte", 16).view(-1, 1, 28, 28), read("labels-idx1-ubyte", 8).long())


def train(args, data, device, mixed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Flatten(), nn.Linear(7 * 7 * 32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype=dtype, enabled=mixed)
    scaler = torch.amp.GradScaler(device.type, enabled=mixed and dtype == torch.float16)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    sampler = DistributedSampler(data)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(DataLoader(data, 100, sampler=sampler), 1):
            optimizer.zero_grad()
            with autocast:
                loss = functional.cross_entropy(ddp(images.to(device).float() / 255), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if dist.get_rank() == 0 and step % 20 == 0:
                print(f"{'mixed' if mixed else 'fp32'}, epoch {epoch + 1}, step {step}: loss {loss.item():.6g}", flush=True)
    return model.eval(), autocast


@torch.no_grad()
def test(model, autocast, data, device, name):
    rank, size = dist.get_rank(), dist.get_world_size()
    correct = torch.zeros(1, dtype=torch.int64, device=device)
    for images, labels in zip(data.tensors[0][rank::size].split(500), data.tensors[1][rank::size].split(500)):
        with autocast:
            correct += (model(images.to(device).float() / 255).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"{name} on {size} processes: accuracy {100 * correct.item() / len(data):.2f} %", flush=True)
    if correct.item() < 0.9 * len(data):
        raise SystemExit("expected an accuracy of 90 %")


def run(gpu, args):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", gpu) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method="env://", rank=args.number * args.gpus + gpu,
                            world_size=args.machines * args.gpus)
    images, labels = load(args.data, "train").tensors
    data = TensorDataset(images[:args.images], labels[:args.images])
    for mixed in (False, True):
        model, autocast = train(args, data, device, mixed)
        test(model, autocast, load(args.data, "t10k"), device, "mixed" if mixed else "fp32")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", dest="machines", type=int, default=1, help="number of machines")
    parser.add_argument("-g", dest="gpus", type=int, default=1, help="GPUs of each, or processes where there are none")
    parser.add_argument("-nr", dest="number", type=int, default=0, help="number of this machine, from 0")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--data", default="data/mnist")
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(arguments,), nprocs=arguments.gpus)
