#!/usr/bin/env python3
"""What ../char_gpt.cpp does, in PyTorch.

    torchrun --nproc-per-node 2 char_gpt.py [TEXT_FILE]
"""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        y = x + self.out(attended.transpose(1, 2).flatten(2))
        return y + self.down(functional.gelu(self.up(self.norm2(y))))


class Gpt(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.characters, self.places = nn.Embedding(classes, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, 0, 0.02)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.characters(tokens) + self.places(torch.arange(tokens.shape[1])))))


def loss_of(logits, rows):
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def sample(model, tokens, count):
    for _ in range(count):
        odds = (model(tokens[:, -CONTEXT:])[:, -1].float() / 0.7).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(odds, 1)], 1)
    return tokens[0]


with open(sys.argv[1] if len(sys.argv) > 1 else "data/alice.txt", "rb") as file:
    data = file.read()
vocabulary = sorted(set(data))
tokens = torch.tensor([vocabulary.index(byte) for byte in data])
train, rest = tokens[:len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10:]
windows, held_out = train.unfold(0, CONTEXT + 1, 1), rest.unfold(0, CONTEXT + 1, CONTEXT)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Gpt(len(vocabulary))
ddp = DistributedDataParallel(model)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)

torch.manual_seed(1 + dist.get_rank())  # other rows on every rank
for step in range(300):
    rows = windows[torch.randint(len(windows), (16 // dist.get_world_size(),))]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(ddp(rows[:, :-1]), rows)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    loss = loss_of(model(held_out[:, :-1]), held_out).item()
    if dist.get_rank() == 0:
        prompt = torch.tensor([[vocabulary.index(byte) for byte in b"The "]])
        print(f"held-out loss {loss:.4f} on {dist.get_world_size()} processes")
        print(bytes(vocabulary[token] for token in sample(model, prompt, 200)).decode(errors="replace"))
dist.destroy_process_group()
sys.exit(loss >= 2.4)
