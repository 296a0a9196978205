#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

// The conformance data: results of other systems, as JSON, read from SEMITONE_CONFORMANCE_DIR or
// else from tests/conformance/data.
namespace semitone::test {

std::filesystem::path conformance_dir();

// A whole file, e.g. "rounding.json". Throws if it is missing, is not JSON, or has another schema
// than "<name>/1".
nlohmann::json conformance(const std::string& file);

// A number that may be written as "inf", "-inf" or "nan".
double number(const nlohmann::json& value);

// The tensor that autocast_cpu.json describes by shape, dtype, fill and seed.
at::Tensor make_tensor(const nlohmann::json& description);

// An argument of autocast_cpu.json, converted to the operator's schema.
c10::IValue make_argument(const nlohmann::json& description, const c10::TypePtr& type);

}  // namespace semitone::test
