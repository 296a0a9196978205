// The cost of a region per operator. Chains of operators run on tensors so small that nothing else
// matters: in LibTorch's own autocast, in a region of the preset `torch` (the same rows) and in one
// of the preset `semitone`.
#include "benchmarks/support/interleave.h"
#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <fmt/format.h>

namespace {

namespace amp = semitone::amp;
using semitone::bench::Contender;

constexpr int kOperators = 100;

struct Chain {
  const char* name;
  torch::Tensor (*step)(const torch::Tensor& x, const torch::Tensor& weight);
};

// LibTorch's own region, like torch.autocast.
class StockRegion {
 public:
  StockRegion() : enabled_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~StockRegion() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, enabled_);
  }
  StockRegion(const StockRegion&) = delete;
  StockRegion& operator=(const StockRegion&) = delete;

 private:
  bool enabled_;
};

torch::Tensor run(const Chain& chain, torch::Tensor x, const torch::Tensor& weight) {
  for (int i = 0; i < kOperators; ++i) x = chain.step(x, weight);
  return x;
}

void require_equal(const torch::Tensor& got, const torch::Tensor& expected, const char* chain) {
  if (!torch::equal(got, expected)) {
    throw semitone::Error("bench.autocast",
                          std::string("the values of LibTorch's autocast in ") + chain, "others");
  }
}

// The first timing is LibTorch's own region.
void print_added(const std::vector<semitone::bench::Timing>& timings) {
  constexpr double kPerOperator = 1e6 / kOperators;
  const auto& stock = timings.front();
  for (std::size_t i = 1; i < timings.size(); ++i) {
    fmt::print("{:<34} {:>+12.3f} {:>+12.3f}  us an operator over stock (min, median)\n",
               timings[i].name, (timings[i].min_seconds - stock.min_seconds) * kPerOperator,
               (timings[i].median_seconds - stock.median_seconds) * kPerOperator);
  }
  fmt::print("\n");
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const auto weight = torch::rand({8, 8}).requires_grad_();
  const Chain chains[] = {
      {"mm (lower)",
       [](const torch::Tensor& x, const torch::Tensor& w) { return torch::mm(x, w).clamp(-1, 1); }},
      {"linear (lower)",
       [](const torch::Tensor& x, const torch::Tensor& w) { return torch::linear(x, w); }},
      {"softmax",
       [](const torch::Tensor& x, const torch::Tensor&) { return torch::softmax(x, 1); }},
      {"stack (promote)",
       [](const torch::Tensor& x, const torch::Tensor&) { return torch::stack({x, x})[0]; }},
      {"relu (in no list)",
       [](const torch::Tensor& x, const torch::Tensor&) { return torch::relu(x); }},
  };
  const auto same_rows = amp::CastPolicy::torch(torch::kBFloat16);
  const auto semitone_rows = amp::CastPolicy::semitone(torch::kBFloat16);
  for (const bool grad : {false, true}) {
    const torch::AutoGradMode mode(grad);
    for (const Chain& chain : chains) {
      const auto x = torch::rand({8, 8}).mul_(0.1);
      const auto in_stock = [&] {
        const StockRegion region;
        return run(chain, x, weight);
      };
      const auto in_ours = [&](const amp::CastPolicy& policy) {
        const amp::Autocast region(policy);
        return run(chain, x, weight);
      };
      require_equal(in_ours(same_rows), in_stock(), chain.name);
      const std::vector<Contender> contenders{
          {"stock autocast", in_stock},
          {"semitone, preset torch", [&] { in_ours(same_rows); }},
          {"semitone, preset semitone", [&] { in_ours(semitone_rows); }},
          {"no region", [&] { run(chain, x, weight); }}};
      const auto timings = semitone::bench::interleave(contenders, 40, 5);
      semitone::bench::print(fmt::format("{}{}: one operator of {}", chain.name,
                                         grad ? ", recorded by autograd" : "", kOperators),
                             timings, 1e-6, "us", kOperators);
      print_added(timings);
    }
  }
}
