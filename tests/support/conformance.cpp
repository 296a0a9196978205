#include "tests/support/conformance.h"

#include "semitone/core/dtype.h"
#include "src/core/env.h"

#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <vector>

namespace semitone::test {
namespace {

using nlohmann::json;

c10::ScalarType dtype_by_name(const std::string& name) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<c10::ScalarType>(i);
    if (dtype_name(dtype) == name) return dtype;
  }
  throw std::runtime_error("conformance data: unknown dtype " + name);
}

// Top 24 bits of splitmix64: the generator that the data's README defines.
std::uint32_t hashed(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t z = (seed << 32) + i + 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return static_cast<std::uint32_t>((z ^ (z >> 31)) >> 40);
}

double uniform(std::uint64_t seed, std::uint64_t i) {
  return hashed(seed, i) / 16777216.0;
}

}  // namespace

std::filesystem::path conformance_dir() {
  if (const auto given = env::get(env::kConformanceDir)) return *given;
  return std::filesystem::path(SEMITONE_SOURCE_DIR) / "tests/conformance/data";
}

json conformance(const std::string& file) {
  const auto path = conformance_dir() / file;
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("conformance data: cannot read " + path.string());
  json data = json::parse(stream);
  const std::string schema = std::filesystem::path(file).stem().string() + "/1";
  if (data.at("schema") != schema) {
    throw std::runtime_error(path.string() + ": expected schema " + schema + ", got " +
                             data.at("schema").dump());
  }
  return data;
}

double number(const json& value) {
  if (!value.is_string()) return value.get<double>();
  if (value == "inf") return std::numeric_limits<double>::infinity();
  if (value == "-inf") return -std::numeric_limits<double>::infinity();
  if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
  throw std::runtime_error("conformance data: no number: " + value.dump());
}

at::Tensor make_tensor(const json& description) {
  const auto shape = description.at("tensor").get<std::vector<std::int64_t>>();
  const auto dtype = dtype_by_name(description.at("dtype"));
  const std::string fill = description.at("fill");
  const auto seed = description.value("seed", std::uint64_t{0});
  const bool complex = c10::isComplexType(dtype);
  std::int64_t elements = 1;
  for (const auto size : shape) elements *= size;
  const std::int64_t count = complex ? 2 * elements : elements;

  auto values = torch::empty({count}, torch::kDouble);
  auto* out = values.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<std::uint64_t>(i);
    if (fill == "unit") {
      out[i] = uniform(seed, index);
    } else if (fill == "signed") {
      out[i] = 2 * uniform(seed, index) - 1;
    } else if (fill == "mod") {
      out[i] = static_cast<double>(hashed(seed, index) % description.at("n").get<std::uint32_t>()) +
               description.value("lo", 0.0);
    } else if (fill == "iota") {
      out[i] = description.value("lo", 0.0) + static_cast<double>(i);
    } else if (fill == "const") {
      out[i] = number(description.at("value"));
    } else if (fill == "spd") {
      const auto size = static_cast<std::uint64_t>(shape.at(0));
      const std::uint64_t row = std::min(index / size, index % size);
      const std::uint64_t column = std::max(index / size, index % size);
      out[i] =
          uniform(seed, row * size + column) + (row == column ? static_cast<double>(size) : 0.0);
    } else {
      throw std::runtime_error("conformance data: unknown fill " + fill);
    }
  }
  if (complex) return torch::view_as_complex(values.view({elements, 2})).to(dtype).view(shape);
  return values.view(shape).to(dtype);
}

c10::IValue make_argument(const json& description, const c10::TypePtr& type) {
  if (const auto optional = type->cast<c10::OptionalType>()) {
    if (description.is_null()) return {};
    return make_argument(description, optional->getElementType());
  }
  if (description.is_null()) return {};
  if (description.is_boolean()) return description.get<bool>();
  if (description.is_string()) return description.get<std::string>();
  if (description.is_number_integer()) {
    const auto value = description.get<std::int64_t>();
    return type->kind() == c10::TypeKind::FloatType ? c10::IValue(static_cast<double>(value))
                                                    : c10::IValue(value);
  }
  if (description.is_number()) return description.get<double>();
  if (description.is_object()) {
    if (description.contains("tensor")) return make_tensor(description);
    if (description.contains("scalar_type")) {
      return static_cast<std::int64_t>(dtype_by_name(description.at("scalar_type")));
    }
    const json& tensors = description.at("tensors");
    const auto element = type->expectRef<c10::ListType>().getElementType();
    if (element->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> list;
      for (const json& tensor : tensors) {
        list.push_back(tensor.is_null() ? std::optional<at::Tensor>() : make_tensor(tensor));
      }
      return list;
    }
    c10::List<at::Tensor> list;
    for (const json& tensor : tensors) list.push_back(make_tensor(tensor));
    return list;
  }
  // A list of integers or reals; an empty one has the schema's element type.
  const auto element = type->expectRef<c10::ListType>().getElementType();
  if (element->kind() == c10::TypeKind::FloatType) return description.get<std::vector<double>>();
  if (element->kind() == c10::TypeKind::BoolType) return description.get<std::vector<bool>>();
  return description.get<std::vector<std::int64_t>>();
}

}  // namespace semitone::test
