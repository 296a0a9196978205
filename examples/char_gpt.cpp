// A GPT that writes characters: bf16 at O1 on one or several processes, which divide the batch (DDP)
// and the optimizer's state (ZeRO). In PyTorch: python/char_gpt.py.
//
//   semitone launch --nproc-per-node 2 char_gpt [TEXT_FILE]
//
// Alone, it is one process.
#include <semitone/semitone.h>
#include <semitone/zoo/text.h>

#include <torch/torch.h>

#include <iostream>
#include <memory>

namespace amp = semitone::amp;
namespace comm = semitone::comm;
namespace parallel = semitone::parallel;
namespace zoo = semitone::zoo;

constexpr int64_t kContext = 64;  // characters that the model sees
constexpr int64_t kWidth = 64;
constexpr int64_t kHeads = 4;
constexpr int64_t kLayers = 2;

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm1 =
      register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(kWidth, kWidth));
  torch::nn::LayerNorm norm2 =
      register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));

  torch::Tensor forward(const torch::Tensor& x) {
    const auto heads = qkv(norm1(x))
                           .view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const auto attended = torch::scaled_dot_product_attention(
        heads[0], heads[1], heads[2], /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    const auto y = x + out(attended.transpose(1, 2).flatten(2));
    return y + down(torch::gelu(up(norm2(y))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  torch::nn::Embedding characters;
  torch::nn::Embedding places = register_module("places", torch::nn::Embedding(kContext, kWidth));
  torch::nn::Sequential blocks = register_module("blocks", torch::nn::Sequential());
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear head;

  explicit GptImpl(int64_t classes)
      : characters(register_module("characters", torch::nn::Embedding(classes, kWidth))),
        head(register_module("head", torch::nn::Linear(kWidth, classes))) {
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(Block());
    for (const auto& embedding : {characters, places})
      torch::nn::init::normal_(embedding->weight, 0, 0.02);
  }

  // Tokens (N, length) to logits (N, length, classes).
  torch::Tensor forward(const torch::Tensor& tokens) {
    const auto x = characters(tokens) + places(torch::arange(tokens.size(1), tokens.device()));
    return head(norm(blocks->forward(x)));
  }
};
TORCH_MODULE(Gpt);

namespace {

torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& rows) {
  return torch::cross_entropy_loss(logits.flatten(0, 1), rows.narrow(1, 1, kContext).flatten());
}

std::string sample(amp::MixedPrecision& mixed, Gpt& model, const zoo::Text& text,
                   const std::string& prompt, int64_t count) {
  const auto device = model->parameters().front().device();
  auto tokens = text.encode(prompt).to(device, torch::kLong).unsqueeze(0);
  for (int64_t i = 0; i < count; ++i) {
    const auto seen = tokens.narrow(1, std::max<int64_t>(0, tokens.size(1) - kContext),
                                    std::min(tokens.size(1), kContext));
    const auto odds = mixed.forward(model, seen).select(1, -1).div(0.7).softmax(-1);
    tokens = torch::cat({tokens, torch::multinomial(odds, 1)}, 1);
  }
  return text.decode(tokens.cpu());
}

}  // namespace

int main(int argc, char** argv) try {
  const auto text = zoo::load_text(argc > 1 ? argv[1] : "data/alice.txt");
  const int64_t train = text.size() * 9 / 10;  // the rest is held out
  const auto windows = text.tokens.narrow(0, 0, train).unfold(0, kContext + 1, 1);
  const auto held_out = text.tokens.narrow(0, train, text.size() - train)
                            .unfold(0, kContext + 1, kContext)
                            .to(torch::kLong);

  const comm::Group group = comm::init();
  torch::manual_seed(0);
  Gpt model(text.classes());
  model->to(group.device());
  parallel::ZeroRedundancyOptimizer optimizer(
      model->parameters(),
      [](const auto& groups) {
        return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(3e-3));
      },
      group);
  auto mixed = amp::initialize(model, optimizer, amp::Options("O1").dtype(torch::kBFloat16));
  parallel::DistributedDataParallel ddp(model, group);

  torch::manual_seed(1 + static_cast<uint64_t>(group.rank()));  // other rows on every rank
  for (int step = 0; step < 300; ++step) {
    const auto chosen = torch::randint(windows.size(0), {16 / group.size()}, torch::kLong);
    const auto rows = windows.index_select(0, chosen).to(group.device(), torch::kLong);
    optimizer.zero_grad();
    const auto loss = loss_of(mixed.forward(ddp, rows.narrow(1, 0, kContext)), rows);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.clip_grad_norm_(optimizer, 1.0);
    mixed.step(optimizer);
    if (step % 50 == 0 && group.rank() == 0)
      std::cout << "step " << step << ": loss " << loss.item<double>() << '\n';
  }

  const torch::NoGradGuard no_grad;
  const auto rows = held_out.to(group.device());
  const double loss =
      loss_of(mixed.forward(model, rows.narrow(1, 0, kContext)), rows).item<double>();
  if (group.rank() == 0) {
    std::cout << "held-out loss " << loss << " on " << group.size() << " processes\n"
              << sample(mixed, model, text, "The ", 200) << '\n';
  }
  return loss < 2.4 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
