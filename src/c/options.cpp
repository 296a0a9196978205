#include "src/c/options.h"

#include "semitone/core/error.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/core/nearest.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::c {
namespace {

// The value of an option, as the type of its setter.
class OptionValue {
 public:
  OptionValue(const SemitoneOption& option, const char* function)
      : name_(option.name), value_(option.value), function_(function) {}

  double real() const { return value_; }
  std::int64_t integer() const {
    // The largest range in which every integer is a double.
    if (std::trunc(value_) != value_ || std::abs(value_) > 0x1p53) fail("an integer");
    return static_cast<std::int64_t>(value_);
  }
  bool boolean() const {
    if (value_ != 0 && value_ != 1) fail("0 or 1");
    return value_ == 1;
  }
  at::ScalarType dtype() const {
    switch (integer()) {
      case SEMITONE_FLOAT16:
        return at::kHalf;
      case SEMITONE_BFLOAT16:
        return at::kBFloat16;
      case SEMITONE_FLOAT32:
        return at::kFloat;
      case SEMITONE_FLOAT64:
        return at::kDouble;
      default:
        fail("a floating dtype, SEMITONE_FLOAT32 …");
    }
  }
  amp::OverflowCount overflow_count() const {
    if (value_ == 0) return amp::OverflowCount::run_then_restart;
    if (value_ == 1) return amp::OverflowCount::run;
    if (value_ == 2) return amp::OverflowCount::since_growth;
    fail("0 (run_then_restart), 1 (run) or 2 (since_growth)");
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const {
    std::ostringstream found;
    found << value_;
    throw Error(function_, expected + " for the option '" + name_ + "'", found.str());
  }

  std::string name_;
  double value_;
  const char* function_;
};

template <typename Options>
struct Setter {
  std::string_view name;
  void (*set)(Options& options, const OptionValue& value);
};

using ScaleOptions = amp::LossScaleOptions;
constexpr std::array kScaleSetters{
    Setter<ScaleOptions>{"init_scale", [](auto& o, const auto& v) { o.init_scale(v.real()); }},
    Setter<ScaleOptions>{"growth_factor",
                         [](auto& o, const auto& v) { o.growth_factor(v.real()); }},
    Setter<ScaleOptions>{"backoff_factor",
                         [](auto& o, const auto& v) { o.backoff_factor(v.real()); }},
    Setter<ScaleOptions>{"growth_interval",
                         [](auto& o, const auto& v) { o.growth_interval(v.integer()); }},
    Setter<ScaleOptions>{"growth_delay",
                         [](auto& o, const auto& v) { o.growth_delay(v.integer()); }},
    Setter<ScaleOptions>{"min_scale", [](auto& o, const auto& v) { o.min_scale(v.real()); }},
    Setter<ScaleOptions>{"max_scale", [](auto& o, const auto& v) { o.max_scale(v.real()); }},
    Setter<ScaleOptions>{"hysteresis", [](auto& o, const auto& v) { o.hysteresis(v.integer()); }},
    Setter<ScaleOptions>{"overflow_count",
                         [](auto& o, const auto& v) { o.overflow_count(v.overflow_count()); }},
    Setter<ScaleOptions>{"dynamic", [](auto& o, const auto& v) { o.dynamic(v.boolean()); }},
    Setter<ScaleOptions>{"max_consecutive_skips",
                         [](auto& o, const auto& v) { o.max_consecutive_skips(v.integer()); }},
    Setter<ScaleOptions>{"scale_dtype", [](auto& o, const auto& v) { o.scale_dtype(v.dtype()); }},
};

using DdpOptions = parallel::DistributedDataParallelOptions;
constexpr std::array kDdpSetters{
    Setter<DdpOptions>{"bucket_cap_mb", [](auto& o, const auto& v) { o.bucket_cap_mb(v.real()); }},
    Setter<DdpOptions>{"first_bucket_mb",
                       [](auto& o, const auto& v) { o.first_bucket_mb(v.real()); }},
    Setter<DdpOptions>{"broadcast_buffers",
                       [](auto& o, const auto& v) { o.broadcast_buffers(v.boolean()); }},
    Setter<DdpOptions>{"find_unused_parameters",
                       [](auto& o, const auto& v) { o.find_unused_parameters(v.boolean()); }},
    Setter<DdpOptions>{"static_graph", [](auto& o, const auto& v) { o.static_graph(v.boolean()); }},
    Setter<DdpOptions>{"gradient_as_bucket_view",
                       [](auto& o, const auto& v) { o.gradient_as_bucket_view(v.boolean()); }},
    Setter<DdpOptions>{"delay_allreduce",
                       [](auto& o, const auto& v) { o.delay_allreduce(v.boolean()); }},
    Setter<DdpOptions>{"gradient_predivide_factor",
                       [](auto& o, const auto& v) { o.gradient_predivide_factor(v.real()); }},
    Setter<DdpOptions>{"allreduce_always_fp32",
                       [](auto& o, const auto& v) { o.allreduce_always_fp32(v.boolean()); }},
    Setter<DdpOptions>{"compress", [](auto& o, const auto& v) { o.compress(v.dtype()); }},
};

template <typename Options, typename Setters>
Options apply(Options base, const Setters& setters, const SemitoneOption* options,
              std::size_t count, const char* function) {
  if (count > 0) require_pointer(options, "list of options", function);
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = string_of(options[i].name, "name for each option", function);
    bool found = false;
    for (const auto& setter : setters) {
      if (setter.name != name) continue;
      setter.set(base, OptionValue(options[i], function));
      found = true;
    }
    if (found) continue;
    std::vector<std::string> names;
    names.reserve(setters.size());
    for (const auto& setter : setters) names.emplace_back(setter.name);
    const std::string similar = nearest(name, names);
    throw Error(function, "the name of an option", "'" + name + "'",
                similar.empty() ? "" : "did you mean " + similar + "?");
  }
  return base;
}

}  // namespace

amp::LossScaleOptions with_options(const amp::LossScaleOptions& base, const SemitoneOption* options,
                                   std::size_t count, const char* function) {
  return apply(base, kScaleSetters, options, count, function);
}

parallel::DistributedDataParallelOptions with_options(
    const parallel::DistributedDataParallelOptions& base, const SemitoneOption* options,
    std::size_t count, const char* function) {
  return apply(base, kDdpSetters, options, count, function);
}

amp::LossScaleOptions loss_scale_preset(const char* name, const char* function) {
  const std::string preset = string_of(name, "name of a preset", function);
  if (preset == "semitone") return {};
  if (preset == "torch") return amp::LossScaleOptions::torch();
  if (preset == "apex") return amp::LossScaleOptions::apex();
  if (preset == "paddle") return amp::LossScaleOptions::paddle();
  if (preset == "deepspeed") return amp::LossScaleOptions::deepspeed();
  throw Error(function, "'semitone', 'torch', 'apex', 'paddle' or 'deepspeed'", "'" + preset + "'");
}

}  // namespace semitone::c
