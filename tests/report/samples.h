#pragma once

#include "tests/report/run_directory.h"

#include <ATen/core/Tensor.h>
#include <torch/types.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

// The samples of a Recorder.
namespace semitone::report::test {

// The lines of one kind.
inline std::vector<nlohmann::json> lines_of_kind(const std::filesystem::path& directory,
                                                 std::string_view kind) {
  std::vector<nlohmann::json> lines;
  for (const nlohmann::json& line : samples_in(directory))
    if (line.at("kind") == kind) lines.push_back(line);
  return lines;
}

// The steps that were looked at.
inline std::vector<std::int64_t> sampled_steps(const std::filesystem::path& directory) {
  std::vector<std::int64_t> steps;
  for (const nlohmann::json& line : lines_of_kind(directory, "sample"))
    steps.push_back(line.at("step").get<std::int64_t>());
  return steps;
}

// The only sample.
inline nlohmann::json sample_in(const std::filesystem::path& directory) {
  const auto samples = lines_of_kind(directory, "sample");
  EXPECT_EQ(samples.size(), 1U);
  return samples.empty() ? nlohmann::json() : samples.front();
}

// An element of a list of a sample with these values; null if there is none.
inline nlohmann::json find_in(const nlohmann::json& list, const nlohmann::json& wanted) {
  for (const nlohmann::json& element : list) {
    bool has_all = true;
    for (const auto& [key, value] : wanted.items()) has_all = has_all && element.at(key) == value;
    if (has_all) return element;
  }
  return nullptr;
}

inline nlohmann::json tensor_in(const nlohmann::json& sample, std::string_view what,
                                std::string_view name) {
  return find_in(sample.at("tensors"), {{"what", what}, {"name", name}});
}

// The counts of a tensor's values, one value after the other, by exponent.
struct Counted {
  std::int64_t zeros = 0;
  std::int64_t nans = 0;
  std::int64_t infs = 0;
  double max_abs = 0;
  std::map<int, std::int64_t> exponents;

  bool operator==(const Counted&) const = default;
};

inline Counted counted(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(torch::kDouble).contiguous().view(-1);
  Counted counts;
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const double value = std::abs(values.const_data_ptr<double>()[i]);
    if (std::isnan(value)) {
      ++counts.nans;
    } else if (std::isinf(value)) {
      ++counts.infs;
    } else if (value == 0) {
      ++counts.zeros;
    } else {
      ++counts.exponents[std::ilogb(value)];
      counts.max_abs = std::max(counts.max_abs, value);
    }
  }
  return counts;
}

inline Counted counted(const nlohmann::json& sampled) {
  Counted counts;
  counts.zeros = sampled.at("zeros").get<std::int64_t>();
  counts.nans = sampled.at("nans").get<std::int64_t>();
  counts.infs = sampled.at("infs").get<std::int64_t>();
  counts.max_abs = sampled.at("max_abs").get<double>();
  int exponent = sampled.at("first_exponent").get<int>();
  for (const auto& count : sampled.at("counts")) {
    if (count > 0) counts.exponents[exponent] = count.get<std::int64_t>();
    ++exponent;
  }
  return counts;
}

// That a sample has these values of a tensor.
inline void expect_sampled(const nlohmann::json& sample, std::string_view what,
                           std::string_view name, const at::Tensor& tensor) {
  const nlohmann::json sampled = tensor_in(sample, what, name);
  ASSERT_FALSE(sampled.is_null()) << what << " " << name;
  EXPECT_EQ(sampled.at("numel"), tensor.numel()) << what << " " << name;
  EXPECT_EQ(counted(sampled), counted(tensor)) << what << " " << name << ": " << sampled;
}

}  // namespace semitone::report::test
