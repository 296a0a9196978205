#!/usr/bin/env python3
"""The workloads of `semitone bench` in PyTorch: the same models, shapes of batches, optimizers and rates, driven in the same way.

    torch_workloads.py mnist|resnet50|encoder|decoder --mode MODE [--device cuda] [flags of semitone bench for sizes, threads, seed]

    fp32           PyTorch's defaults: eager, images in NCHW; AdamW with fused=True, SGD with its default
    tf32           fp32, and CUDA's products of matrices may round their factors to TF32, as those of convolutions do by default
    bf16           the usual recommendations: torch.autocast in bfloat16, channels last for images, fused optimizers
    fp16           the same in float16, with torch.amp's GradScaler
    pure-bf16      the model itself in bfloat16, without autocast: weights, gradients and optimizer state too; fused optimizers, channels last
    compile        bf16, with the model and its loss under torch.compile; needs a C++ compiler
    max-autotune   the same with torch.compile(mode="max-autotune"), which tries several kernels for each product
    ipex           bf16 as Intel Extension for PyTorch trains: ipex.optimize of model and optimizer, torch.autocast, channels last; on CPUs only
    compile-fp16   the same of fp16
    apex           Apex's opt level O2 written with PyTorch's functions: fp16 model with BatchNorm in fp32, fp32 masters, dynamic scale

First checks, without dropout, that the losses are finite and fall. Then says "ready" and runs the steps that each line "step N" on
standard input asks for; the answer is a line of JSON with the seconds.
"""
import contextlib
import importlib.metadata

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
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.layers(self.dropout(self.norm(x)))).flatten(0, 1)


def rotate(heads, cos, sin):
    first, second = heads.chunk(2, -1)
    return heads * cos.to(heads.dtype) + torch.cat([-second, first], -1) * sin.to(heads.dtype)


class DecoderLayer(nn.Module):
    def __init__(self, options):
        super().__init__()
        width, self.heads = options.width, options.heads
        self.norm1, self.norm2 = (nn.RMSNorm(width, protocol.NORM_EPS) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(width, options.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(options.ffn, width, bias=False)

    def forward(self, x, cos, sin):
        y = self.norm1(x)
        queries, keys, values = (projection(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                                 for projection in (self.q_proj, self.k_proj, self.v_proj))
        mixed = functional.scaled_dot_product_attention(rotate(queries, cos, sin), rotate(keys, cos, sin), values, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    """Returns the logits of all tokens, (N * length, vocabulary)."""

    def __init__(self, options):
        super().__init__()
        self.size = options.width // options.heads
        self.token_embedding = nn.Embedding(options.vocabulary, options.width)
        self.layers = nn.ModuleList(DecoderLayer(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width, protocol.NORM_EPS)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        frequencies = protocol.ROPE_THETA ** (torch.arange(0, self.size, 2, device=tokens.device) / -self.size)
        angles = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(1) * frequencies.repeat(2)
        cos, sin = angles.cos(), angles.sin()
        x = self.token_embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.token_embedding.weight).flatten(0, 1)


def make_model(options, dropout):
    torch.manual_seed(options.seed)
    if options.workload == "decoder":
        return Decoder(options)
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
    if options.workload == "decoder":
        tokens = torch.randint(options.vocabulary, (count, options.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    channels, size = (1, 28) if options.workload == "mnist" else (3, options.image_size)
    return torch.randn(count, channels, size, size), torch.randint(protocol.CLASSES[options.workload], (count,))


# The dtype of autocast in each mode that has it.
AUTOCAST = {"bf16": torch.bfloat16, "compile": torch.bfloat16, "max-autotune": torch.bfloat16, "ipex": torch.bfloat16,
            "fp16": torch.float16, "compile-fp16": torch.float16}
COMPILED = {"compile": "default", "max-autotune": "max-autotune", "compile-fp16": "default"}
MODES = ["fp32", "tf32", *AUTOCAST, "pure-bf16", "apex"]
INITIAL_SCALE = 2.0**16  # of losses in fp16
GROWTH_INTERVAL = 2000


class Training:
    def __init__(self, options, dropout):
        self.device = torch.device(options.device)
        self.lowers = options.mode not in ("fp32", "tf32")
        self.dtype = AUTOCAST.get(options.mode)
        self.inputs, self.labels = (tensor.to(self.device) for tensor in make_batch(options))
        self.model = make_model(options, dropout).to(self.device)
        if self.lowers and options.workload in protocol.CLASSES:
            self.model.to(memory_format=torch.channels_last)
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
        if options.mode == "pure-bf16":
            self.model.bfloat16()
            if self.inputs.is_floating_point():
                self.inputs = self.inputs.bfloat16()
        self.optimizer = self.make_optimizer(options, list(self.model.parameters()))
        self.scaler = torch.amp.GradScaler(self.device.type, INITIAL_SCALE, enabled=self.dtype == torch.float16)
        self.last_scale = INITIAL_SCALE

        def loss_of(inputs, labels):
            return functional.cross_entropy(self.model(inputs), labels)

        self.loss_of = torch.compile(loss_of, mode=COMPILED[options.mode]) if options.mode in COMPILED else loss_of

    def make_optimizer(self, options, parameters):
        rate = protocol.RATES[options.workload]
        if options.workload not in protocol.CLASSES:
            return torch.optim.AdamW(parameters, rate, weight_decay=protocol.WEIGHT_DECAY, fused=True)
        if options.mode == "pure-bf16" and self.device.type == "cpu":
            # PyTorch 2.11's fused SGD leaves weights of 16 bits on a CPU as they are.
            return torch.optim.SGD(parameters, rate, protocol.MOMENTUM, foreach=True)
        return torch.optim.SGD(parameters, rate, protocol.MOMENTUM, fused=True if self.lowers else None)

    def step(self):
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.dtype) if self.dtype else contextlib.nullcontext():
            loss = self.loss_of(self.inputs, self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def loss_scale(self):
        return self.scaler.get_scale() if self.scaler.is_enabled() else self.last_scale

    def was_skipped(self):
        before, self.last_scale = self.last_scale, self.loss_scale()
        return self.last_scale < before

    def peak_mb(self):
        return torch.cuda.max_memory_allocated(self.device) / 2**20 if self.device.type == "cuda" else None

    def lasting_mb(self):
        def megabytes(tensors):
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20

        parameters = list(self.model.parameters())
        state = [tensor for entry in self.optimizer.state.values() for tensor in entry.values() if torch.is_tensor(tensor)]
        return {"parameters": megabytes([*parameters, *self.model.buffers()]),
                "gradients": megabytes(parameter.grad for parameter in parameters if parameter.grad is not None),
                "optimizer_state": megabytes(state)}


class IpexTraining(Training):
    """On CPUs IPEX 2.8 replaces SGD's step by its own, whose fp32 masters are the bf16 weights and their lower halves. It has none for
    AdamW: PyTorch's fused one steps fp32 masters."""

    def make_optimizer(self, options, parameters):
        import intel_extension_for_pytorch as ipex

        self.model, optimizer = ipex.optimize(self.model, optimizer=super().make_optimizer(options, parameters), dtype=torch.bfloat16)
        return optimizer


class ApexTraining(Training):
    """As apex.amp.initialize(..., opt_level="O2") trains, with torch's fused optimizers in the place of Apex's."""

    def make_optimizer(self, options, parameters):
        self.model.half()
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()
        if self.inputs.is_floating_point():
            self.inputs = self.inputs.half()
        self.parameters = parameters
        self.masters = [parameter.detach().float().clone() for parameter in parameters]
        self.scale, self.good_steps = INITIAL_SCALE, 0
        return super().make_optimizer(options, self.masters)

    def step(self):
        for parameter in self.parameters:
            parameter.grad = None
        loss = functional.cross_entropy(self.model(self.inputs).float(), self.labels)
        (loss * self.scale).backward()
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = torch.empty_like(master)
        grads = [master.grad for master in self.masters]
        torch._foreach_copy_(grads, [parameter.grad for parameter in self.parameters])
        found_inf = torch.zeros(1, device=self.device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, torch.full((1,), 1 / self.scale, device=self.device))
        self.update(bool(found_inf.item()))
        return loss.item()

    def loss_scale(self):
        return self.scale

    def lasting_mb(self):
        return {**super().lasting_mb(), "masters": sum(master.numel() * 4 for master in self.masters) / 2**20}

    def update(self, overflow):
        if overflow:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        self.good_steps += 1
        if self.good_steps % GROWTH_INTERVAL == 0:
            self.scale *= 2


def main():
    options = protocol.parse(MODES)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = options.mode == "tf32"
    training = {"apex": ApexTraining, "ipex": IpexTraining}.get(options.mode, Training)
    versions = {"torch": torch.__version__, "device": options.device}
    if options.mode == "ipex":
        versions["intel_extension_for_pytorch"] = importlib.metadata.version("intel_extension_for_pytorch")
    protocol.drive(options, lambda dropout: training(options, dropout), versions)


if __name__ == "__main__":
    main()
