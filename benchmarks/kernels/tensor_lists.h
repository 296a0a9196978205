#pragma once

#include "benchmarks/kernels/differentiable.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <string>

// Lists of tensors, as optimizers have them.
namespace semitone::bench {

inline Tensors random_list(const Sizes& sizes, at::ScalarType dtype, double factor = 1) {
  Tensors tensors;
  for (std::int64_t i = 0; i < sizes.tensors; ++i)
    tensors.push_back((torch::randn({sizes.elements}, sizes.device) * factor).to(dtype));
  return tensors;
}

// Copies.
inline Tensors like(const Tensors& tensors, at::ScalarType dtype) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) made.push_back(tensor.to(dtype, false, /*copy=*/true));
  return made;
}

inline Moved moved_list(const std::string& name, const Tensors& tensors, int times = 1) {
  Moved all = moved(name, tensors[0], times);
  all.bytes *= static_cast<double>(tensors.size());
  return all;
}

inline std::string name_of_lists(const Sizes& sizes) {
  return fmt::format("{} x {}", sizes.tensors, sizes.elements);
}

}  // namespace semitone::bench
