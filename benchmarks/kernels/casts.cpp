#include "benchmarks/kernels/differentiable.h"
#include "benchmarks/support/check.h"
#include "src/kernels/convert.h"

#include <torch/torch.h>

namespace semitone::bench {

// The casts of large tensors in a region.
void add_casts(std::vector<Case>& cases, const Sizes& sizes) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool down : {true, false}) {
      const auto count = sizes.tensors * sizes.elements;
      cases.push_back({down ? "cast from float32" : "cast to float32", dtype,
                       name_of_shape({count}), [=]() -> std::vector<Row> {
                         const auto to = down ? dtype : at::kFloat;
                         const at::Tensor x = torch::randn({count}).to(down ? at::kFloat : dtype);
                         const at::Tensor y = kernels::convert(x, to);
                         require_within(y, x.to(at::kDouble), {.share_of_largest = 1e-8}, "a cast");
                         return {{.moved = {moved("x", x), moved("y", y)},
                                  .work = [x, to] { kernels::convert(x, to); },
                                  .libtorchs = [x, to] { x.to(to); }}};
                       }});
    }
  }
}

}  // namespace semitone::bench
