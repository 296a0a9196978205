// Your own code under autocast: an autograd function that needs fp32, and plain callables that run
// in 16 bits, in fp32, or in the widest dtype of their arguments.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;

// exp(x) - 1, which cancels in 16 bits: forward and backward run in fp32 in every region.
struct Expm1 : torch::autograd::Function<Expm1> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x) {
    const amp::CustomForward scope(ctx, torch::kFloat);
    x = scope.cast(x);
    ctx->save_for_backward({x});
    return torch::exp(x) - 1;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               torch::autograd::tensor_list grads) {
    const amp::CustomBackward scope(ctx);
    return {grads[0] * torch::exp(ctx->get_saved_variables()[0])};
  }
};

int main() try {
  const auto x = torch::rand({8, 16}, torch::requires_grad());
  const auto weight = torch::rand({4, 16}, torch::requires_grad());
  // Tensor arithmetic, which has no row in a policy; half_function makes it run in 16 bits.
  const auto project = amp::half_function([](const torch::Tensor& input, const torch::Tensor& w) {
    return (input.unsqueeze(1) * w).sum(-1);
  });

  const auto mean_square =
      amp::float_function([](const torch::Tensor& input) { return (input * input).mean(); });
  const auto blend = amp::promote_function(
      [](const torch::Tensor& a, const torch::Tensor& b) { return (a + b) / 2; });

  torch::Tensor projected;
  torch::Tensor result;
  torch::Tensor energy;
  torch::Tensor blended;
  {
    const amp::Autocast region(torch::kCPU, torch::kBFloat16);
    projected = project(x, weight);
    result = Expm1::apply(projected);
    energy = mean_square(projected);
    blended = blend(projected, result);
  }
  result.sum().backward();
  std::cout << "half_function: " << projected.dtype() << ", Expm1: " << result.dtype()
            << ", gradients: " << weight.grad().dtype() << ", float_function: " << energy.dtype()
            << ", promote_function: " << blended.dtype() << '\n';
  const bool right =
      energy.scalar_type() == torch::kFloat && blended.scalar_type() == torch::kFloat &&
      projected.scalar_type() == torch::kBFloat16 && result.scalar_type() == torch::kFloat &&
      weight.grad().scalar_type() == torch::kFloat && x.grad().isfinite().all().item<bool>();
  return right ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
