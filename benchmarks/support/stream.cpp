#include "benchmarks/support/stream.h"

#include <torch/types.h>

namespace semitone::bench {

Stream::Stream(std::int64_t elements) : x_(at::ones({elements})), y_(at::ones({elements})) {}

Contender Stream::contender() const {
  return {"y += x", [x = x_, y = y_] { y.add_(x); }};
}

double Stream::bytes() const {
  return 3.0 * static_cast<double>(x_.nbytes());
}

}  // namespace semitone::bench
