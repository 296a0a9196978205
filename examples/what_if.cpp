// What fp16, bf16 and fp8 would do to each product of a model, seen from a training in fp32.
#include <semitone/report.h>

#include <torch/torch.h>

#include <algorithm>
#include <iostream>

namespace report = semitone::report;

int main() try {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  model->push_back("first", torch::nn::Linear(16, 32));
  model->push_back("relu", torch::nn::ReLU());
  model->push_back("second", torch::nn::Linear(32, 4));
  torch::optim::SGD optimizer(model->parameters(), 0.01);

  report::WhatIf what_if(*model);
  const auto x = torch::randn({64, 16}) * 1e5;  // more than fp16 can hold
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    (model->forward(x) * 1e-6).square().mean().backward();
    optimizer.step();
    what_if.next_step();
  }
  std::cout << what_if.to_string();

  // The fraction of the first layer's arguments that would be inf in fp16 and in bf16.
  const auto rows = what_if.rows();
  const auto first = std::ranges::find_if(
      rows, [](const auto& row) { return row.layer == "first" && !row.backward; });
  if (first == rows.end()) return 1;
  const double fp16 = first->effects[0].overflow;
  const double bf16 = first->effects[1].overflow;
  std::cout << "overflow of the first layer: " << fp16 << " in fp16, " << bf16 << " in bf16\n";
  return fp16 > 0.1 && bf16 == 0 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
