#include "benchmarks/support/stream.h"

#include <torch/types.h>

namespace semitone::bench {

Stream::Stream(std::int64_t elements, at::Device device)
    : x_(at::ones({elements}, device)), y_(at::ones({elements}, device)) {}

Contender Stream::contender() const {
  if (!x_.is_cpu()) return {"copy", [x = x_, y = y_] { y.copy_(x); }};
  return {"y += x", [x = x_, y = y_] { y.add_(x); }};
}

double Stream::bytes() const {
  const double arrays = x_.is_cpu() ? 3 : 2;
  return arrays * static_cast<double>(x_.nbytes());
}

}  // namespace semitone::bench
