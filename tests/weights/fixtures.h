#pragma once

#include "semitone/weights/state_dict.h"
#include "tests/support/conformance.h"
#include "tests/support/temporary_folder.h"

#include <ATen/ops/equal.h>
#include <torch/types.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

// Files that Python's packages wrote, and what is in them.
namespace semitone::test {

inline std::string from_base64(const std::string& text) {
  static const std::string kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  std::uint32_t bits = 0;
  int count = 0;
  for (const char digit : text) {
    if (digit == '=') break;
    bits = bits << 6 | static_cast<std::uint32_t>(kDigits.find(digit));
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count & 0xFF);
  }
  return bytes;
}

inline const nlohmann::json& python_files() {
  static const nlohmann::json data = conformance("weights_files.json");
  return data;
}

inline std::string python_file(const std::string& name) {
  return from_base64(python_files().at("files").at(name).get<std::string>());
}

inline c10::ScalarType dtype_in_python(const std::string& name) {
  static const std::map<std::string, c10::ScalarType> kDtypes{{"float64", at::kDouble},
                                                              {"float32", at::kFloat},
                                                              {"float16", at::kHalf},
                                                              {"bfloat16", at::kBFloat16},
                                                              {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                                              {"float8_e5m2", at::kFloat8_e5m2},
                                                              {"int64", at::kLong},
                                                              {"int32", at::kInt},
                                                              {"int16", at::kShort},
                                                              {"int8", at::kChar},
                                                              {"uint8", at::kByte},
                                                              {"uint16", at::kUInt16},
                                                              {"uint32", at::kUInt32},
                                                              {"uint64", at::kUInt64},
                                                              {"bool", at::kBool},
                                                              {"complex64", at::kComplexFloat},
                                                              {"complex128", at::kComplexDouble}};
  return kDtypes.at(name);
}

// The tensors that Python had: "state_dict", "dtypes" or "views".
inline weights::StateDict expected_tensors(const std::string& name) {
  weights::StateDict tensors;
  for (const auto& [key, value] : python_files().at("expected").at(name).items()) {
    const auto values = value.at("values").get<std::vector<double>>();
    const auto shape = value.at("shape").get<std::vector<std::int64_t>>();
    tensors.insert(key, torch::tensor(values, torch::kDouble)
                            .reshape(shape)
                            .to(dtype_in_python(value.at("dtype").get<std::string>())));
  }
  return tensors;
}

// Whether both have the same dtype, shape and bytes. For the dtypes that operators lack, too.
inline bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  if (x.nbytes() == 0) return true;  // memcmp must not get a null pointer
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// A difference in words, or nothing.
inline std::string difference(const weights::StateDict& found, const weights::StateDict& expected) {
  for (const auto& item : expected) {
    const at::Tensor* value = found.find(item.key());
    if (value == nullptr) return "no '" + item.key() + "'";
    if (!same_bytes(*value, item.value())) return c10::str("'", item.key(), "' is ", *value);
  }
  if (found.size() != expected.size()) return std::to_string(found.size()) + " tensors";
  return {};
}

}  // namespace semitone::test
