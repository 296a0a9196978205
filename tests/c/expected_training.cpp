// The training of ctypes_test.py in C++, through the ordinary interface. Reads the data and the
// initial weights from a file, and writes the bits of each step's loss and scale, and of the final
// weights.
//
// c_expected_training INPUT OUTPUT

#include "semitone/amp.h"

#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

namespace amp = semitone::amp;

// Numbers that the file begins with.
struct Sizes {
  std::int64_t steps, rows, inputs, hidden, classes, use_masters;
};

class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }

  void read(void* to, std::size_t size) {
    if (at_ + size > bytes_.size()) throw std::runtime_error("the input is too short");
    std::memcpy(to, bytes_.data() + at_, size);
    at_ += size;
  }

  torch::Tensor tensor(at::IntArrayRef sizes, at::ScalarType dtype) {
    torch::Tensor made = torch::empty(sizes, dtype);
    read(made.data_ptr(), made.nbytes());
    return made;
  }

 private:
  std::string bytes_;
  std::size_t at_ = 0;
};

void write(std::ofstream& file, const torch::Tensor& tensor) {
  const torch::Tensor dense = tensor.detach().contiguous();
  file.write(static_cast<const char*>(dense.data_ptr()),
             static_cast<std::streamsize>(dense.nbytes()));
}

void write(std::ofstream& file, double value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof value);
}

void train(const char* input_file, const char* output_file) {
  Reader reader(input_file);
  Sizes sizes{};
  reader.read(&sizes, sizeof sizes);
  torch::nn::Linear first(sizes.inputs, sizes.hidden);
  torch::nn::Linear second(sizes.hidden, sizes.classes);
  const std::vector<torch::Tensor> weights{first->weight, first->bias, second->weight,
                                           second->bias};
  {
    const torch::NoGradGuard no_grad;
    for (const torch::Tensor& weight : weights)
      weight.copy_(reader.tensor(weight.sizes(), at::kFloat));
  }
  const torch::Tensor inputs = reader.tensor({sizes.steps, sizes.rows, sizes.inputs}, at::kFloat);
  const torch::Tensor targets = reader.tensor({sizes.steps, sizes.rows}, at::kLong);
  if (sizes.use_masters != 0) {
    first->to(at::kHalf);
    second->to(at::kHalf);
  }

  torch::optim::SGD optimizer(weights, torch::optim::SGDOptions(0.5));
  std::optional<amp::MasterWeights> masters;
  if (sizes.use_masters != 0) masters.emplace(optimizer);
  amp::GradScaler scaler(
      amp::LossScaleOptions().init_scale(0x1p24).growth_interval(5).growth_factor(4));
  const auto policy = sizes.use_masters != 0 ? amp::CastPolicy::none({at::kCPU, at::kHalf})
                                             : amp::CastPolicy::semitone({at::kCPU, at::kHalf});
  std::ofstream file(output_file, std::ios::binary);
  for (std::int64_t step = 0; step < sizes.steps; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const amp::Autocast region(policy);
      torch::Tensor input = inputs[step];
      if (masters.has_value()) input = input.to(at::kHalf);
      torch::Tensor output = second->forward(torch::relu(first->forward(input)));
      if (masters.has_value()) output = output.to(at::kFloat);
      loss = torch::cross_entropy_loss(output, targets[step]);
    }
    scaler.scale(loss).backward();
    if (masters.has_value()) masters->take_gradients();
    if (scaler.step(optimizer) == amp::Step::stepped && masters.has_value()) masters->write_model();
    scaler.update();
    write(file, loss);
    write(file, scaler.get_scale());
  }
  for (const torch::Tensor& weight : weights) write(file, weight);
  write(file, static_cast<double>(scaler.scaler().skipped_steps()));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) throw std::runtime_error("expected INPUT OUTPUT");
    train(argv[1], argv[2]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
