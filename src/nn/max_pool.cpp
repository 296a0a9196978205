#include "src/nn/max_pool.h"

#include "semitone/core/error.h"
#include "src/nn/arguments.h"
#include "src/nn/checks.h"
#include "src/nn/kernel_reads.h"
#include "src/nn/recorded_gradients.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace semitone::nn {
namespace {

using kernels::MaxPool;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Pair = std::array<std::int64_t, 2>;

c10::IValue list_of(const Pair& pair) {
  return std::vector<std::int64_t>(pair.begin(), pair.end());
}

Pair pair_of(const c10::IValue& list) {
  const auto values = list.toIntVector();
  return {values.at(0), values.at(1)};
}

class MaxPoolFunction : public torch::autograd::Function<MaxPoolFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const MaxPool& pool) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const auto pooled = kernels::max_pool2d(input, pool, /*with_places=*/true);
    ctx->save_for_backward({input, pooled.places});
    ctx->saved_data["kernel"] = list_of(pool.kernel);
    ctx->saved_data["stride"] = list_of(pool.stride);
    ctx->saved_data["padding"] = list_of(pool.padding);
    return pooled.output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& input = saved[0];
    const MaxPool pool{.kernel = pair_of(ctx->saved_data["kernel"]),
                       .stride = pair_of(ctx->saved_data["stride"]),
                       .padding = pair_of(ctx->saved_data["padding"])};
    variable_list result;
    if (at::GradMode::is_enabled()) {  // create_graph
      result = recorded_gradients({input}, gradients[0], [&](const variable_list& in) {
        return kernels::ref::max_pool2d(in[0], pool, /*with_places=*/false).output;
      });
    } else {
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      result = {kernels::max_pool2d_backward(gradients[0], saved[1], input, pool)};
    }
    result.emplace_back();  // of the settings
    return result;
  }
};

void check(const at::Tensor& input, const MaxPool& pool) {
  constexpr auto kComponent = "nn.max_pool2d";
  check_input(kComponent, input);
  if (input.dim() != 4)
    throw Error(kComponent, "an input (N, C, H, W)", c10::str("one of shape ", input.sizes()));
  const auto longest = std::max(pool.kernel[0], pool.kernel[1]);
  if (longest > kernels::kMaxPoolWindow || pool.window() > kernels::kMaxPoolWindow) {
    throw Error(kComponent, c10::str("a window of at most ", kernels::kMaxPoolWindow, " elements"),
                c10::str("one of ", pool.kernel[0], " x ", pool.kernel[1]),
                "use at::max_pool2d for larger windows");
  }
}

}  // namespace

at::Tensor max_pool2d(const at::Tensor& input, const MaxPool& pool) {
  check(input, pool);
  note_kernel_reads(input);
  if (is_recorded({input})) return MaxPoolFunction::apply(input, pool);
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  return kernels::max_pool2d(input, pool, /*with_places=*/false).output;
}

}  // namespace semitone::nn
