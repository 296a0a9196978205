// The options of amp::initialize: the properties of a level one by one, the loss scale, and which
// layers stay in fp32.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace amp = semitone::amp;

struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(3, 8, 3));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(8));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(8, 2));

  torch::Tensor forward(const torch::Tensor& images) {
    return head(torch::relu(norm(conv(images))).flatten(2).amax(2));
  }
};
TORCH_MODULE(Net);

namespace {

// Trains a net, and prints the dtypes of its layers. Returns whether the loss has fallen.
bool train(const std::string& name, const amp::Options& options) {
  torch::manual_seed(0);
  Net model;
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  auto mixed = amp::initialize(model, optimizer, options);
  const auto images = torch::randn({32, 3, 8, 8});
  const auto labels = torch::randint(2, {32});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::cross_entropy_loss(mixed.forward(model, images), labels);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::cout << name << ": conv " << model->conv->weight.dtype() << ", norm "
            << model->norm->weight.dtype() << ", head " << model->head->weight.dtype() << ", loss "
            << first << " -> " << last << ", scale " << mixed.loss_scaler().scale() << '\n';
  return last < first;
}

}  // namespace

int main() try {
  const amp::Options half = amp::Options("O2").dtype(torch::kHalf).verbosity(0);
  const std::vector<std::pair<std::string, amp::Options>> runs = {
      {"nothing", amp::Options(half).enabled(false)},
      // Properties may also come as text, as from a command line.
      {"each property of O2", amp::Options(half)
                                  .cast_model_type(torch::kHalf)
                                  .patch_torch_functions(false)
                                  .keep_batchnorm_fp32("True")
                                  .master_weights("True")
                                  .loss_scale("dynamic")
                                  .min_loss_scale(1)
                                  .max_loss_scale(0x1p20)
                                  .cast_model_outputs(torch::kFloat)},
      {"O2 with a constant scale", amp::Options(half).loss_scale(128.0)},
      {"the same as options of the scaler",
       amp::Options(half).loss_scale_options(amp::LossScaleOptions::fixed(128))},
      {"O2 with the rule of Apex",
       amp::Options(half).loss_scale_options(amp::LossScaleOptions::apex())},
      {"O2 with the head in fp32",
       amp::Options(half).policy(amp::CastPolicy::none(torch::kHalf).keep_fp32_params("head.*"))},
      {"O2 with one pass for the whole step", amp::Options(half).fuse_optimizers(true)},
      {"O2 that casts nothing", amp::Options(half).cast_model_type(std::nullopt)},
      {"O3 with BatchNorm in fp32",
       amp::Options("O3").dtype(torch::kBFloat16).keep_batchnorm_fp32(true).verbosity(0)},
      {"O1 in bf16", amp::Options("O1").dtype(torch::kBFloat16).verbosity(0)},
  };
  bool learned = true;
  for (const auto& [name, options] : runs) learned = train(name, options) && learned;

  // Without an optimizer: a model that only predicts.
  Net model;
  model->eval();
  auto mixed = amp::initialize(model, amp::Options(half).cast_model_outputs(torch::kHalf));
  const torch::NoGradGuard no_grad;
  const auto predicted = mixed.forward(model, torch::randn({4, 3, 8, 8}));
  std::cout << "results of a model that only predicts: " << predicted.dtype() << '\n';
  return learned && predicted.scalar_type() == torch::kHalf ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
