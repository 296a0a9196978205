// An LSTM language model with truncated backpropagation through time: the state goes from one part
// of the text to the next, and gradients are clipped by norm. In PyTorch: python/lstm_language_model.py.
//
//   lstm_language_model [fp16|bf16] [TEXT_FILE]
#include <semitone/amp.h>
#include <semitone/optim.h>
#include <semitone/zoo/text.h>

#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <tuple>

namespace amp = semitone::amp;
namespace optim = semitone::optim;
namespace zoo = semitone::zoo;

using State = std::tuple<torch::Tensor, torch::Tensor>;  // hidden and cell state of the LSTM

struct LanguageModelImpl : torch::nn::Module {
  torch::nn::Embedding encoder;
  torch::nn::LSTM lstm = register_module(
      "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(64, 128).num_layers(2).dropout(0.1)));
  torch::nn::Linear decoder;

  explicit LanguageModelImpl(int64_t classes)
      : encoder(register_module("encoder", torch::nn::Embedding(classes, 64))),
        decoder(register_module("decoder", torch::nn::Linear(128, classes))) {}

  // Tokens (length, N) to logits (length, N, classes), with the state after the last token.
  std::tuple<torch::Tensor, State> forward(const torch::Tensor& tokens, const State& state) {
    auto [output, next] = lstm(encoder(tokens), state);
    return {decoder(output), next};
  }

  static State first_state(int64_t rows) {
    return {torch::zeros({2, rows, 128}), torch::zeros({2, rows, 128})};
  }
};
TORCH_MODULE(LanguageModel);

namespace {

// Columns of consecutive text, (length, columns): column after column is the whole text.
torch::Tensor batchify(const torch::Tensor& tokens, int64_t columns) {
  const int64_t length = tokens.size(0) / columns;
  return tokens.narrow(0, 0, length * columns).view({columns, length}).t().to(torch::kLong);
}

torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

}  // namespace

int main(int argc, char** argv) try {
  const auto dtype = argc > 1 && argv[1] == std::string("bf16") ? torch::kBFloat16 : torch::kHalf;
  const auto text = zoo::load_text(argc > 2 ? argv[2] : "data/alice.txt");
  const int64_t train = text.size() * 9 / 10;  // the rest is held out
  const int64_t columns = 32;
  const auto data = batchify(text.tokens.narrow(0, 0, train), columns);
  const auto held_out = batchify(text.tokens.narrow(0, train, text.size() - train), 4);

  torch::manual_seed(0);
  LanguageModel model(text.classes());
  optim::FusedAdam optimizer(model->parameters(), 1e-2);
  auto mixed = amp::initialize(model, optimizer, amp::Options("O1").dtype(dtype));

  const int64_t bptt = 35;
  for (int epoch = 0; epoch < 5; ++epoch) {
    State state = LanguageModelImpl::first_state(columns);
    double sum = 0;
    int64_t parts = 0;
    for (int64_t i = 0; i + bptt < data.size(0); i += bptt, ++parts) {
      state = {std::get<0>(state).detach(), std::get<1>(state).detach()};
      torch::Tensor logits;
      std::tie(logits, state) = mixed.forward(model, data.narrow(0, i, bptt), state);
      const auto loss = loss_of(logits, data.narrow(0, i + 1, bptt));
      mixed.scale_loss(loss, optimizer).backward();
      mixed.clip_grad_norm_(optimizer, 0.25);  // unscaled gradients
      mixed.step(optimizer);
      mixed.zero_grad(optimizer);
      sum += loss.item<double>();
    }
    std::cout << "epoch " << epoch << ": perplexity " << std::exp(sum / static_cast<double>(parts))
              << '\n';
  }

  const torch::NoGradGuard no_grad;
  model->eval();
  const int64_t length = held_out.size(0) - 1;
  const auto [logits, state] =
      mixed.forward(model, held_out.narrow(0, 0, length), LanguageModelImpl::first_state(4));
  const double loss = loss_of(logits, held_out.narrow(0, 1, length)).item<double>();
  std::cout << "held-out perplexity " << std::exp(loss) << ", skipped " << mixed.skipped_steps()
            << '\n';
  return std::exp(loss) < 7 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
