// Which operator runs in which precision: the lists of other systems, edits of them, an operator of
// your own, and fp8.
#include <semitone/amp.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <iostream>
#include <sstream>
#include <string>

namespace amp = semitone::amp;

TORCH_LIBRARY(mylib, library) {
  library.def("project(Tensor x, Tensor weight) -> Tensor",
              [](const at::Tensor& x, const at::Tensor& weight) {
                return (x.unsqueeze(1) * weight).sum(-1);
              });
}

namespace {

torch::Tensor project(const torch::Tensor& x, const torch::Tensor& weight) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mylib::project", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, weight);
}

// The dtypes in which a policy computes some operators.
std::string dtypes_of(const amp::CastPolicy& policy) {
  const amp::Autocast region(policy);
  const auto x = torch::rand({4, 8});
  std::ostringstream text;
  text << "mm " << torch::mm(x, torch::rand({8, 8})).dtype() << ", softmax "
       << torch::softmax(x.to(policy.dtype()), 1).dtype() << ", project "
       << project(x, torch::rand({2, 8})).dtype();
  return text.str();
}

}  // namespace

int main() try {
  const amp::CastTarget target(torch::kCPU, torch::kBFloat16);  // {}: of the GPU, if there is one
  // The policies of other systems, and how they differ.
  bool right = true;
  for (const auto& policy : {amp::CastPolicy::semitone(target), amp::CastPolicy::torch(target),
                             amp::CastPolicy::apex(target), amp::CastPolicy::paddle(target),
                             amp::CastPolicy::paddle(target, amp::PaddleLevel::O2)}) {
    std::cout << policy.name() << ": " << dtypes_of(policy) << '\n';
    right = right && policy.find("mm").has_value() && !policy.find("mylib::project").has_value();
  }

  // The named operators run in 16 bits, and what follows in the dtype of their results. Paddle's
  // level "OD" is similar.
  const auto only = amp::CastPolicy::none(target).lower("conv2d");
  std::cout << "conv2d only: " << dtypes_of(only) << '\n';

  // Edits of rows. binary_cross_entropy is banned where a policy follows PyTorch or Apex on GPUs.
  auto policy = amp::CastPolicy::torch(target);
  policy.lower("mylib::project").keep_fp32("softmax").keep_fp32("binary_cross_entropy");
  policy.promote("addcmul").widest("cat");
  std::cout << "edited: " << dtypes_of(policy) << '\n';
  right = right && dtypes_of(policy) == "mm c10::BFloat16, softmax float, project c10::BFloat16";
  {
    const amp::Autocast region(policy);
    const auto probabilities = torch::rand({4}, torch::kBFloat16);
    const auto loss = torch::binary_cross_entropy(probabilities, torch::ones({4}));
    right = right && loss.scalar_type() == torch::kFloat;
  }

  // The same with the names of Apex.
  amp::register_half_function(policy, "mylib::project");
  amp::register_float_function(policy, "softmax");
  amp::register_promote_function(policy, "cat");

  // Matrix products in emulated fp8. Such a policy has scales for each layer, so bind() connects it
  // with a model.
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(64, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 64));
  const auto x = torch::randn({32, 64});
  const auto exact = model->forward(x);
  const auto options = amp::Fp8Options()
                           .forward(torch::kFloat8_e4m3fn)
                           .backward(torch::kFloat8_e5m2)
                           .margin(0)
                           .amax_history(16);
  const auto fp8 = amp::CastPolicy::semitone(target).fp8(options).bind(model);
  torch::Tensor rounded;
  {
    const amp::Autocast region(fp8);
    rounded = model->forward(x).to(torch::kFloat);
  }
  const double error = ((rounded - exact).norm() / exact.norm()).item<double>();
  std::cout << "relative error of fp8: " << error << '\n';
  return right && error > 0.005 && error < 0.2 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
