#!/usr/bin/env python3
"""The workloads of `semitone bench` in Paddle: the same models, shapes of batches, optimizers and rates, driven in the same way.

    paddle_workloads.py mnist|resnet50|encoder --mode fp32 [flags of semitone bench for sizes, threads, seed]

fp32 only: on a CPU, Paddle 3.3 says that amp.auto_cast "makes no effect".
"""
import math

import paddle
from paddle import nn
from paddle.nn import functional

import protocol


def convolution(channels, out, size, stride):
    return nn.Sequential(nn.Conv2D(channels, out, size, stride, size // 2, bias_attr=False), nn.BatchNorm2D(out))


class Bottleneck(nn.Layer):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.reduce = convolution(channels, width, 1, 1)
        self.middle = convolution(width, width, 3, stride)
        self.expand = convolution(width, width * 4, 1, 1)
        self.expand[1].weight.set_value(paddle.full_like(self.expand[1].weight, protocol.RESIDUAL_GAIN))
        self.shortcut = convolution(channels, width * 4, 1, stride) if stride != 1 or channels != width * 4 else None

    def forward(self, x):
        y = functional.relu(self.reduce(x))
        y = functional.relu(self.middle(y))
        return functional.relu(self.expand(y) + (x if self.shortcut is None else self.shortcut(x)))


def resnet50(classes):
    layers = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2D(3, 2, 1)]
    channels = width = 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = width * 4
        width *= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(channels, classes))


def conv_net():
    return nn.Sequential(nn.Conv2D(1, 16, 5, padding=2), nn.BatchNorm2D(16), nn.ReLU(), nn.MaxPool2D(2),
                         nn.Conv2D(16, 32, 5, padding=2), nn.BatchNorm2D(32), nn.ReLU(), nn.MaxPool2D(2),
                         nn.Flatten(), nn.Linear(7 * 7 * 32, 10))


class Encoder(nn.Layer):
    """Returns the logits of all tokens, (N * length, vocabulary)."""

    def __init__(self, options, dropout):
        super().__init__()
        width = options.width
        self.token_embedding = nn.Embedding(options.vocabulary, width)
        self.position_embedding = nn.Embedding(options.max_positions, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, options.heads, options.ffn, dropout, "gelu")
        self.layers = nn.TransformerEncoder(layer, options.layers)
        self.head = nn.Linear(width, options.vocabulary)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.set_value(0.02 * paddle.randn(parameter.shape))

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding(paddle.arange(tokens.shape[1]))
        return self.head(self.layers(self.dropout(self.norm(x)))).flatten(0, 1)


def make_model(options, dropout):
    paddle.seed(options.seed)
    if options.workload == "encoder":
        return Encoder(options, dropout)
    model = conv_net() if options.workload == "mnist" else resnet50(protocol.CLASSES["resnet50"])
    for parameter in model.parameters():
        if parameter.dim() > 1:  # PyTorch's start
            bound = parameter.shape[0] ** -0.5 if parameter.dim() == 2 else math.prod(parameter.shape[1:]) ** -0.5
            parameter.set_value(paddle.uniform(parameter.shape, min=-bound, max=bound))
    return model


def make_batch(options):
    paddle.seed(options.seed)
    count = options.batch_size
    if options.workload == "encoder":
        tokens = paddle.randint(0, options.vocabulary, (count, options.length))
        masked = paddle.rand(tokens.shape) < protocol.MASKED
        return paddle.where(masked, paddle.zeros_like(tokens), tokens), tokens.flatten()
    channels, size = (1, 28) if options.workload == "mnist" else (3, options.image_size)
    return paddle.randn((count, channels, size, size)), paddle.randint(0, protocol.CLASSES[options.workload], (count,))


class Training:
    def __init__(self, options, dropout):
        self.model = make_model(options, dropout)
        self.inputs, self.labels = make_batch(options)
        rate, parameters = protocol.RATES[options.workload], self.model.parameters()
        self.optimizer = (paddle.optimizer.AdamW(rate, parameters=parameters, weight_decay=protocol.WEIGHT_DECAY)
                          if options.workload == "encoder" else paddle.optimizer.Momentum(rate, protocol.MOMENTUM, parameters))

    def step(self):
        loss = functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad(set_to_zero=False)
        return float(loss)

    def lasting_mb(self):
        def megabytes(tensors):
            return sum(tensor.size * tensor.element_size() for tensor in tensors) / 2**20

        parameters = list(self.model.parameters())
        state = [tensor for tensor in self.optimizer.state_dict().values() if isinstance(tensor, paddle.Tensor)]
        return {"parameters": megabytes([*parameters, *self.model.buffers()]), "gradients": megabytes(parameter for parameter in parameters if not parameter.stop_gradient),
                "optimizer_state": megabytes(state)}


def main():
    options = protocol.parse(["fp32"], ["mnist", "resnet50", "encoder"])
    if options.threads:
        paddle.base.core.set_num_threads(options.threads)
    protocol.drive(options, lambda dropout: Training(options, dropout), {"paddle": paddle.__version__})


if __name__ == "__main__":
    main()
