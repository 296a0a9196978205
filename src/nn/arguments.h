#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

// Arguments of a torch::autograd::Function, some of which may be undefined. Autograd does not
// support undefined arguments: they have no edge in its graph.
namespace semitone::nn {

inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// Saves for the backward pass which of the arguments, in order, have an edge.
inline void save_edges(torch::autograd::AutogradContext* ctx,
                       std::initializer_list<at::Tensor> arguments) {
  std::vector<std::int64_t> edges;
  std::int64_t next = 0;
  for (const at::Tensor& argument : arguments) edges.push_back(argument.defined() ? next++ : -1);
  ctx->saved_data["edges"] = std::move(edges);
}

// Whether the gradient of that argument is needed.
inline bool is_needed(torch::autograd::AutogradContext* ctx, std::size_t argument) {
  const auto edge = ctx->saved_data["edges"].toIntVector()[argument];
  return edge >= 0 && ctx->needs_input_grad(static_cast<std::size_t>(edge));
}

// Whether autograd records operations on one of them.
inline bool is_recorded(std::initializer_list<at::Tensor> arguments) {
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor& argument : arguments) {
    if (argument.defined() && argument.requires_grad()) return true;
  }
  return false;
}

}  // namespace semitone::nn
