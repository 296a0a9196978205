#include "benchmarks/kernels/differentiable.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <cstddef>

namespace semitone::bench {
namespace {

Tensors leaves_of(const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs)
    leaves.push_back(input.clone(at::MemoryFormat::Preserve).requires_grad_());
  return leaves;
}

Tensors exact(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) all.push_back(tensor.to(at::kDouble));
  return all;
}

Row forward_row(const Differentiable& of) {
  const auto pass = [leaves = leaves_of(of.inputs)](const Function& function) {
    return [leaves, function] { function(leaves); };
  };
  return {.pass = "forward",
          .moved = of.forward,
          .work = pass(of.ours),
          .libtorchs = pass(of.libtorchs)};
}

Row backward_row(const Differentiable& of) {
  const auto pass = [&of, leaves = leaves_of(of.inputs)](const Function& function) {
    return [leaves, result = function(leaves), grad = of.grad] {
      torch::autograd::grad({result}, leaves, {grad}, /*retain_graph=*/true);
    };
  };
  return {.pass = "backward",
          .moved = of.backward,
          .work = pass(of.ours),
          .libtorchs = pass(of.libtorchs)};
}

}  // namespace

std::string name_of_shape(const std::vector<std::int64_t>& shape) {
  return fmt::format("{}", fmt::join(shape, "x"));
}

Moved moved(const std::string& name, const at::Tensor& tensor, int times) {
  return {times == 1 ? name : fmt::format("{}{}", times, name),
          static_cast<double>(times) * static_cast<double>(tensor.nbytes())};
}

Tensors run(const Function& function, const Tensors& inputs, const at::Tensor& grad) {
  const Tensors leaves = leaves_of(inputs);
  Tensors results{function(leaves)};
  for (const at::Tensor& gradient : torch::autograd::grad({results[0]}, leaves, {grad}))
    results.push_back(gradient);
  results[0] = results[0].detach();
  return results;
}

void prove(const Differentiable& of, const Proof& proof) {
  const Tensors got = run(of.ours, of.inputs, of.grad);
  at::Tensor grad = of.grad.to(at::kDouble);
  if (proof.relu) grad = grad * got[0].gt(0);
  Tensors want = run(proof.definition, exact(of.inputs), grad);
  if (proof.relu) want[0] = want[0].relu();
  require_within(got[0], want[0], proof.tolerance, "a result");
  for (std::size_t i = 1; i < got.size(); ++i)
    require_within(got[i], want[i], proof.tolerance, fmt::format("the gradient of input {}", i));
}

std::vector<Row> rows_of(const Differentiable& of) {
  return {forward_row(of), backward_row(of)};
}

}  // namespace semitone::bench
