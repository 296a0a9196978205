#pragma once

#include "semitone/core/error.h"
#include "src/core/archive.h"

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

// Checks and stores options.
namespace semitone::optim {

// Neither the numbers of a file nor those of the program are to lose what their storage holds.
template <typename Options>
void keep_storage_of(const torch::optim::OptimizerOptions& current,
                     torch::optim::OptimizerOptions& loaded) {
  const auto& before = static_cast<const Options&>(current);
  auto& own = static_cast<Options&>(loaded);
  own.split_master(own.split_master() || before.split_master());
  own.bf16_state(own.bf16_state() || before.bf16_state());
}

// The options as the optimizer's own type; Error if a group has another optimizer's options.
template <typename Options>
const Options& options_as(const torch::optim::OptimizerOptions& options,
                          std::string_view component) {
  const auto* own = dynamic_cast<const Options*>(&options);
  if (own == nullptr) {
    throw Error(component, "its own options in every parameter group", "those of another optimizer",
                "use this optimizer's options type for the group");
  }
  return *own;
}

// Error unless low <= value, and value < below. A NaN is never in range.
inline void require_range(std::string_view component, std::string_view name, double value,
                          double low, double below = std::numeric_limits<double>::infinity()) {
  if (value >= low && value < below) return;
  const bool bounded = below != std::numeric_limits<double>::infinity();
  throw Error(component,
              c10::str(name, bounded ? c10::str(" in [", low, ", ", below, ")")
                                     : c10::str(" of at least ", low, " and finite")),
              c10::str(value));
}

inline void require_betas(std::string_view component, const std::tuple<double, double>& betas) {
  require_range(component, "the first of betas", std::get<0>(betas), 0, 1);
  require_range(component, "the second of betas", std::get<1>(betas), 0, 1);
}

inline void require_nesterov(std::string_view component, bool nesterov, double momentum,
                             double dampening) {
  if (!std::isfinite(dampening))
    throw Error(component, "a finite dampening", std::to_string(dampening));
  if (!nesterov || (momentum > 0 && dampening == 0)) return;
  throw Error(component, "momentum and no dampening with nesterov",
              c10::str("momentum ", momentum, " and dampening ", dampening));
}

// Options in an archive, with the names and types of torch.optim.
class OptionsWriter {
 public:
  explicit OptionsWriter(torch::serialize::OutputArchive& archive) : archive_(archive) {}
  template <typename T>
  OptionsWriter& operator()(const std::string& name, const T& value) {
    archive_.write(name, c10::IValue(value));
    return *this;
  }

 private:
  torch::serialize::OutputArchive& archive_;
};

// Reading keeps a value that the archive lacks, since LibTorch's optimizers save fewer. FileError if
// it lacks a required one, which every optimizer with this rule has: the file is another optimizer's.
class OptionsReader {
 public:
  OptionsReader(torch::serialize::InputArchive& archive,
                std::initializer_list<std::string_view> required)
      : archive_(archive), required_(required) {}
  template <typename T>
  OptionsReader& operator()(const std::string& name, T& value) {
    const std::optional<T> stored = find<T>(name);
    if (stored.has_value()) {
      value = *stored;
    } else if (std::find(required_.begin(), required_.end(), name) != required_.end()) {
      throw FileError(kComponent, "the option '" + name + "' of an optimizer with the same rule",
                      "none", "load the file into an optimizer of the kind that saved it");
    }
    return *this;
  }

 private:
  static constexpr auto kComponent = "optim.load";

  template <typename T>
  std::optional<T> find(const std::string& name) {
    if constexpr (std::is_same_v<T, std::tuple<double, double>>) {
      c10::IValue stored;
      if (!archive_.try_read(name, stored)) return std::nullopt;
      const bool two = stored.isTuple() && stored.toTupleRef().elements().size() == 2 &&
                       stored.toTupleRef().elements()[0].isDouble() &&
                       stored.toTupleRef().elements()[1].isDouble();
      if (!two) throw FileError(kComponent, "two numbers for '" + name + "'", stored.tagKind());
      return stored.to<T>();
    } else {
      return find_value<T>(archive_, name, kComponent);
    }
  }

  torch::serialize::InputArchive& archive_;
  std::vector<std::string_view> required_;
};

}  // namespace semitone::optim
