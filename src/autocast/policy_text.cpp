#include "src/autocast/policy_text.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdint>
#include <set>

namespace semitone::amp {
namespace {

using Json = nlohmann::ordered_json;

constexpr auto kPolicyFormat = "semitone.cast-policy";
constexpr int kPolicyVersion = 1;

constexpr std::array kActions{CastAction::lower,  CastAction::fp32,  CastAction::promote,
                              CastAction::widest, CastAction::leave, CastAction::ban};
constexpr std::array kEmulations{Emulation::automatic, Emulation::always, Emulation::never};

// The value with this name.
template <typename Values>
auto parse(const Values& values, const std::string& name, const std::string& where) {
  std::string names;
  for (const auto value : values) {
    if (name_of(value) == name) return value;
    names.append(names.empty() ? "" : ", ").append(name_of(value));
  }
  throw FileError(kPolicyFile, fmt::format("one of {} in {}", names, where),
                  fmt::format("'{}'", name.substr(0, 100)));
}

// A policy has objects three deep. Copying and writing a value takes a part of the program's stack for
// each level.
constexpr int kDeepest = 4;
// LibTorch has some 3500 operators with overloads, each with up to three keys here. A key that is
// added to an ordered object is compared with all before it.
constexpr int kMostKeys = 20'000;

Json parse_json(std::string_view text, const std::string& where) {
  int keys = 0;
  const auto check = [&](int depth, Json::parse_event_t event, const Json& /*value*/) {
    if (depth > kDeepest) {
      throw FileError(kPolicyFile, fmt::format("values at most {} deep in {}", kDeepest, where),
                      "deeper ones");
    }
    if (event == Json::parse_event_t::key && ++keys > kMostKeys)
      throw FileError(kPolicyFile, fmt::format("at most {} keys in {}", kMostKeys, where), "more");
    return true;
  };
  Json json = Json::parse(text, check, /*allow_exceptions=*/false, /*ignore_comments=*/true);
  if (!json.is_object() || json.value("format", Json()) != Json(kPolicyFormat)) {
    throw FileError(
        kPolicyFile, fmt::format(R"(a JSON object with "format": "{}")", kPolicyFormat),
        fmt::format("{}, which is {}", where, json.is_discarded() ? "not JSON" : "of another kind"),
        "write one with CastPolicy::save or `semitone tune --out FILE`");
  }
  return json;
}

// A mistyped key would be ignored without this.
void require_known_keys(const Json& json, const std::set<std::string>& known,
                        const std::string& where) {
  for (const auto& item : json.items()) {
    if (known.contains(item.key())) continue;
    std::string names;
    for (const std::string& name : known) names.append(names.empty() ? "" : ", ").append(name);
    throw FileError(kPolicyFile, fmt::format("only the keys {} in {}", names, where),
                    fmt::format("'{}'", item.key().substr(0, 100)));
  }
}

CastRow row_of(const Json& value, const std::string& where) {
  if (value.is_string())
    return {parse(kActions, value.get<std::string>(), where), std::string(kUserReason)};
  if (!value.is_object()) {
    throw FileError(kPolicyFile, "an action, or an object with one, in " + where,
                    value.dump().substr(0, 100));
  }
  require_known_keys(value, {"action", "reason"}, where);
  return {parse(kActions, value.at("action").get<std::string>(), where),
          value.value("reason", std::string(kUserReason))};
}

// The value of a key that may be missing. `empty` is an object or an array, as the value must be.
Json optional_value(const Json& json, const char* key, const Json& empty,
                    const std::string& where) {
  const auto found = json.find(key);
  if (found == json.end()) return empty;
  if (found->type() == empty.type()) return *found;
  throw FileError(
      kPolicyFile,
      fmt::format("{} of '{}' in {}", empty.is_object() ? "an object" : "a list", key, where),
      found->dump().substr(0, 100));
}

Fp8Options fp8_options_of(const Json& json, const std::string& where) {
  require_known_keys(json, {"forward", "backward", "amax_history", "margin", "keep_16bit_params"},
                     where);
  Fp8Options options;
  const auto format = [&](const char* key, c10::ScalarType fallback) {
    if (!json.contains(key)) return fallback;
    const auto name = json.at(key).get<std::string>();
    for (const auto known : {c10::ScalarType::Float8_e4m3fn, c10::ScalarType::Float8_e5m2})
      if (dtype_name(known) == name) return known;
    throw FileError(kPolicyFile, fmt::format("float8_e4m3fn or float8_e5m2 in {}", where),
                    fmt::format("'{}'", name.substr(0, 100)));
  };
  options.forward(format("forward", options.forward()));
  options.backward(format("backward", options.backward()));
  const auto integer = [&](const char* key, std::int64_t fallback) {
    if (!json.contains(key)) return fallback;
    if (!json.at(key).is_number_integer())
      throw FileError(kPolicyFile, fmt::format("an integer for '{}' in {}", key, where),
                      json.at(key).dump().substr(0, 100));
    return json.at(key).get<std::int64_t>();
  };
  options.amax_history(integer("amax_history", options.amax_history()));
  options.margin(integer("margin", options.margin()));
  options.keep_16bit_params(json.value("keep_16bit_params", options.keep_16bit_params()));
  return options;
}

PolicyText policy_of(const Json& json, const std::string& where) {
  require_known_keys(json,
                     {"format", "version", "preset", "operators", "keep_fp32_params", "emulation",
                      "fp8", "fast_kernels", "fast_kernels_on_gpu"},
                     where);
  if (json.at("version") != kPolicyVersion) {
    throw FileError(kPolicyFile, fmt::format("version {} in {}", kPolicyVersion, where),
                    json.at("version").dump().substr(0, 100), "update Semitone");
  }
  PolicyText policy;
  policy.preset = json.at("preset").get<std::string>();
  const Json operators = optional_value(json, "operators", Json::object(), where);
  for (const auto& item : operators.items()) {
    policy.operators.emplace_back(
        item.key(), row_of(item.value(), fmt::format("operators, '{}', of {}", item.key(), where)));
  }
  policy.fp32_param_globs = optional_value(json, "keep_fp32_params", Json::array(), where)
                                .get<std::vector<std::string>>();
  if (json.contains("emulation"))
    policy.emulation =
        parse(kEmulations, json.at("emulation").get<std::string>(), "emulation of " + where);
  if (json.contains("fp8"))
    policy.fp8 =
        fp8_options_of(optional_value(json, "fp8", Json::object(), where), "fp8 of " + where);
  if (json.contains("fast_kernels_on_gpu"))
    policy.fast_kernels_on_gpu = json.at("fast_kernels_on_gpu").get<bool>();
  if (json.contains("fast_kernels")) {
    policy.fast_kernels =
        optional_value(json, "fast_kernels", Json::array(), where).get<std::vector<std::string>>();
  }
  return policy;
}

}  // namespace

PolicyText parse_policy(std::string_view text, const std::string& where) {
  const Json json = parse_json(text, where);
  try {
    return policy_of(json, where);
  } catch (const Json::exception& error) {
    throw FileError(kPolicyFile, "a cast policy in " + where, error.what(),
                    "docs/cast_policies.md describes the format");
  }
}

std::string to_text(const PolicyText& policy) {
  Json json{{"format", kPolicyFormat}, {"version", kPolicyVersion}, {"preset", policy.preset}};
  Json& operators = json["operators"] = Json::object();
  for (const auto& [op, row] : policy.operators) {
    operators[op] = Json{{"action", name_of(row.action)}};
    if (row.reason != kUserReason) operators[op]["reason"] = row.reason;
  }
  json["keep_fp32_params"] = policy.fp32_param_globs;
  if (policy.emulation != Emulation::automatic) json["emulation"] = name_of(policy.emulation);
  if (policy.fp8.has_value()) {
    json["fp8"] = Json{{"forward", dtype_name(policy.fp8->forward())},
                       {"backward", dtype_name(policy.fp8->backward())},
                       {"amax_history", policy.fp8->amax_history()},
                       {"margin", policy.fp8->margin()},
                       {"keep_16bit_params", policy.fp8->keep_16bit_params()}};
  }
  if (policy.fast_kernels.has_value()) json["fast_kernels"] = *policy.fast_kernels;
  if (policy.fast_kernels_on_gpu) json["fast_kernels_on_gpu"] = true;
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace semitone::amp
