#!/usr/bin/env python3
"""The workloads of `semitone bench` in PyTorch: the same models, shapes of batches, optimizers and rates, driven in the same way.

    torch_workloads.py mnist|resnet50|encoder --mode fp32|bf16|compile [flags of semitone bench for sizes, threads, seed]

    fp32      PyTorch's defaults: eager, images in NCHW; AdamW with fused=True, SGD with its default
    bf16      the usual recommendations: torch.autocast in bfloat16, channels last for images, fused optimizers
    compile   bf16, with the model and its loss under torch.compile; needs a C++ compiler

First checks, without dropout, that the losses are finite and fall. Then says "ready" and runs the steps that each line "step N" on
standard input asks for; the answer is a line of JSON with the seconds.
"""
import contextlib

import torch
from torch import nn
from torch.nn import functional

import protocol
from ddp_resnet import Bottleneck, ResNet50


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32)
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, images):
        x = functional.max_pool2d(torch.relu(self.bn1(self.conv1(images))), 2)
        x = functional.max_pool2d(torch.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


class Encoder(nn.Module):
    """Returns the logits of all tokens, (N * length, vocabulary)."""

    def __init__(self, options, dropout):
        super().__init__()
        width = options.width
        self.token_embedding = nn.Embedding(options.vocabulary, width)
        self.position_embedding = nn.Embedding(options.max_positions, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, options.heads, options.ffn, dropout, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, options.vocabulary)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        return self.head(self.layers(self.dropout(self.norm(x)))).flatten(0, 1)


def make_model(options, dropout):
    torch.manual_seed(options.seed)
    if options.workload == "encoder":
        return Encoder(options, dropout)
    if options.workload == "mnist":
        return ConvNet()
    model = ResNet50()
    for block in model.modules():
        if isinstance(block, Bottleneck):
            nn.init.constant_(block.expand[1].weight, protocol.RESIDUAL_GAIN)
    return model


def make_batch(options):
    torch.manual_seed(options.seed)
    count = options.batch_size
    if options.workload == "encoder":
        tokens = torch.randint(options.vocabulary, (count, options.length))
        return tokens.masked_fill(torch.rand(tokens.shape) < protocol.MASKED, 0), tokens.flatten()
    channels, size = (1, 28) if options.workload == "mnist" else (3, options.image_size)
    return torch.randn(count, channels, size, size), torch.randint(protocol.CLASSES[options.workload], (count,))


class Training:
    def __init__(self, options, dropout):
        self.lowers = options.mode != "fp32"
        self.inputs, self.labels = make_batch(options)
        model = self.model = make_model(options, dropout)
        rate = protocol.RATES[options.workload]
        if options.workload == "encoder":
            self.optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=protocol.WEIGHT_DECAY, fused=True)
        else:
            if self.lowers:
                model.to(memory_format=torch.channels_last)
                self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
            self.optimizer = torch.optim.SGD(model.parameters(), rate, protocol.MOMENTUM, fused=True if self.lowers else None)

        def loss_of(inputs, labels):
            return functional.cross_entropy(model(inputs), labels)

        self.loss_of = torch.compile(loss_of) if options.mode == "compile" else loss_of

    def step(self):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if self.lowers else contextlib.nullcontext():
            loss = self.loss_of(self.inputs, self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def lasting_mb(self):
        def megabytes(tensors):
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20

        parameters = list(self.model.parameters())
        state = [tensor for entry in self.optimizer.state.values() for tensor in entry.values() if torch.is_tensor(tensor)]
        return {"parameters": megabytes([*parameters, *self.model.buffers()]),
                "gradients": megabytes(parameter.grad for parameter in parameters if parameter.grad is not None),
                "optimizer_state": megabytes(state)}


def main():
    options = protocol.parse(["fp32", "bf16", "compile"])
    if options.threads:
        torch.set_num_threads(options.threads)
    protocol.drive(options, lambda dropout: Training(options, dropout), {"torch": torch.__version__})


if __name__ == "__main__":
    main()
