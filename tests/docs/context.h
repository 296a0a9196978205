// What the C++ blocks of README.md and docs/ take for granted: a model, its optimizer, data. Only
// declared: the blocks are compiled, not run.

#pragma once

#include "semitone/semitone.h"

#include <torch/torch.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace semitone::docs {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  torch::Tensor forward(const torch::Tensor& input);
  void reset() override;
};
TORCH_MODULE(Net);

using Batch = torch::data::Example<>;
using Loader = std::vector<Batch>;

extern Net model;
extern torch::optim::SGD optimizer;
extern amp::MixedPrecision mixed;
extern amp::CastPolicy policy;
extern amp::GradScaler scaler;

extern std::vector<Net> blocks;
extern std::unique_ptr<Loader> loader, train_loader, test_loader;
extern Batch batch;
extern torch::data::datasets::MNIST data;
extern const std::size_t epochs;
extern const int world_size, rank;

extern torch::Tensor x, y, weight, bias, loss, logits, tokens;
torch::Tensor loss_fn(const torch::Tensor& output, const torch::Tensor& target);
torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target);
torch::Tensor attention(const torch::Tensor& input);
bool is_training();
void test(Net& model, Loader& loader);
void load_start(Net& model);
std::optional<torch::Tensor> next_request();
void reply(const torch::Tensor& output);
double loss_of_steps(amp::MixedPrecision& mixed, Net& model, torch::optim::Optimizer& optimizer,
                     int steps);

extern int skipped;
extern std::vector<at::Tensor> masters, model_parameters;
extern const double scale;

}  // namespace semitone::docs

// A page shows results that its next block does not use, declares the same names again in the next
// block, and defines functions that no header declares.
#pragma GCC diagnostic ignored "-Wunused"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wmissing-declarations"
