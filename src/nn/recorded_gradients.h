#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <cstddef>
#include <optional>
#include <utility>

// Internal interface: other rooms include this header.

// Gradients that can be differentiated again, for functions whose own backward pass cannot.
namespace semitone::nn {

enum class InRegions { no, yes };

// The gradients of definition(inputs), LibTorch's operators, with their computation recorded.
// Undefined where an input is, or needs none. For the backward pass of a function if autograd
// records it (create_graph). The definition gets views of the inputs: an input may be another one,
// or have been computed from it, and each gradient is that of its own place alone.
//
// @param in_regions  whether the thread's regions of autocast cast the definition's operators
template <typename Definition>
torch::autograd::variable_list recorded_gradients(const torch::autograd::variable_list& inputs,
                                                  const at::Tensor& grad,
                                                  const Definition& definition,
                                                  InRegions in_regions = InRegions::no) {
  const at::AutoGradMode recording(true);
  torch::autograd::variable_list places;
  torch::autograd::variable_list wanted;
  for (const at::Tensor& input : inputs) {
    places.push_back(input.defined() ? input.view_as(input) : input);
    if (input.defined() && input.requires_grad()) wanted.push_back(places.back());
  }
  torch::autograd::variable_list result(inputs.size());
  if (wanted.empty()) return result;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_casts;
  if (in_regions == InRegions::no) no_casts.emplace(c10::autocast_dispatch_keyset);
  const at::Tensor output = definition(std::as_const(places));
  if (in_regions == InRegions::yes) no_casts.emplace(c10::autocast_dispatch_keyset);
  const auto gradients = torch::autograd::grad({output}, wanted, {grad},
                                               /*retain_graph=*/true,
                                               /*create_graph=*/true, /*allow_unused=*/true);
  std::size_t next = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && inputs[i].requires_grad()) result[i] = gradients[next++];
  }
  return result;
}

}  // namespace semitone::nn
