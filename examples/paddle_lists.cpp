// Cast lists, as Paddle users know them: a program edits a value that says which operators run in
// 16 bits. Names of operators are ATen's; `semitone ops --policy paddle` lists them.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;

struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(3, 8, 3));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(8, 2));

  torch::Tensor forward(const torch::Tensor& images) {
    const auto features = torch::relu(conv(images));
    std::cout << "conv: " << features.dtype() << '\n';
    return head(features.mean({2, 3}));
  }
};
TORCH_MODULE(Net);

int main() try {
  Net model;
  const auto policy =
      amp::CastPolicy::paddle(torch::kBFloat16)
          .lower("conv2d")       // custom_white_list
          .lower("matmul")       // there: matmul_v2
          .keep_fp32("softmax")  // custom_black_list
          .keep_fp32("sum")      // there: reduce_sum
          .promote("add")        // there: elementwise_add, with use_promote
          .keep_fp32_params(
              "head.*");  // no counterpart: one layer in fp32, by the names of its parameters
  torch::Tensor output;
  {
    const amp::Autocast region(policy.bind(model));
    output = model->forward(torch::rand({4, 3, 16, 16}));
  }
  std::cout << "head: " << output.dtype() << '\n';
  return output.scalar_type() == torch::kFloat ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
