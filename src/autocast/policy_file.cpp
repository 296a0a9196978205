#include "semitone/autocast/cast_policy.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/op_names.h"
#include "src/core/file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

// A policy as a file, and as code.
namespace semitone::amp {
namespace {

using Json = nlohmann::ordered_json;

constexpr auto kPolicyFile = "amp.cast_policy.file";
constexpr auto kPolicyFormat = "semitone.cast-policy";
constexpr int kPolicyVersion = 1;
constexpr std::string_view kUserReason = "set by the user";

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
constexpr std::uintmax_t kLargestFile = std::uintmax_t{1} << 20;

Json parse_json(const std::string& text, const std::string& where) {
  const auto check = [&](int depth, Json::parse_event_t /*event*/, const Json& /*value*/) {
    if (depth <= kDeepest) return true;
    throw FileError(kPolicyFile, fmt::format("values at most {} deep in {}", kDeepest, where),
                    "deeper ones");
  };
  return Json::parse(text, check, /*allow_exceptions=*/false, /*ignore_comments=*/true);
}

Json read_json(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    throw FileError(kPolicyFile, "a file with a cast policy",
                    fmt::format("'{}', which is a directory", path.string()));
  const std::uintmax_t size = std::filesystem::file_size(path, ignored);
  if (!ignored && size > kLargestFile) {
    throw FileError(kPolicyFile, "a file with a cast policy, of less than 1 MiB",
                    fmt::format("'{}' of {} bytes", path.string(), size));
  }
  const std::string text = read_text(path);
  if (text.empty()) {
    throw FileError(kPolicyFile, "a file with a cast policy",
                    fmt::format("'{}', which is missing, empty or unreadable", path.string()),
                    "write one with CastPolicy::save or `semitone tune --out FILE`");
  }
  const Json json = parse_json(text, "'" + path.string() + "'");
  if (!json.is_object() || json.value("format", Json()) != Json(kPolicyFormat)) {
    throw FileError(kPolicyFile, fmt::format(R"(a JSON object with "format": "{}")", kPolicyFormat),
                    fmt::format("'{}', which is {}", path.string(),
                                json.is_discarded() ? "not JSON" : "of another kind"),
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

void apply(CastPolicy& policy, const Json& json, const std::string& where) {
  const Json operators = optional_value(json, "operators", Json::object(), where);
  for (const auto& item : operators.items()) {
    const CastRow row =
        row_of(item.value(), fmt::format("operators, '{}', of {}", item.key(), where));
    policy.set(item.key(), row.action, row.reason);
  }
  const Json globs = optional_value(json, "keep_fp32_params", Json::array(), where);
  for (const auto& glob : globs) policy.keep_fp32_params(glob.get<std::string>());
  if (json.contains("emulation"))
    policy.emulation(
        parse(kEmulations, json.at("emulation").get<std::string>(), "emulation of " + where));
  if (json.contains("fp8"))
    policy.fp8(
        fp8_options_of(optional_value(json, "fp8", Json::object(), where), "fp8 of " + where));
  if (json.contains("fast_kernels_on_gpu"))
    policy.fast_kernels_on_gpu(json.at("fast_kernels_on_gpu").get<bool>());
  if (!json.contains("fast_kernels")) return;
  policy.fast_kernels(false);
  const Json kernels = optional_value(json, "fast_kernels", Json::array(), where);
  for (const auto& op : kernels) policy.fast_kernel(op.get<std::string>());
}

std::string literal(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string target_code(const CastPolicy& policy) {
  std::string device = c10::DeviceTypeName(policy.device(), /*lower_case=*/false);
  return fmt::format("{{torch::k{}, torch::k{}}}", device, c10::toString(policy.dtype()));
}

std::string preset_code(const CastPolicy& policy) {
  const std::string_view name = policy.name();
  return name.find('-') == std::string_view::npos
             ? fmt::format("CastPolicy::{}({})", name, target_code(policy))
             : fmt::format("CastPolicy::by_name({}, {})", literal(name), target_code(policy));
}

// @param usual  those of the preset
std::string fast_kernels_code(const std::set<std::string>& chosen,
                              const std::set<std::string>& usual) {
  if (chosen.empty() && !usual.empty()) return "\n    .fast_kernels(false)";
  std::string code;
  for (const std::string& op : usual)
    if (!chosen.contains(op)) code += fmt::format("\n    .fast_kernel({}, false)", literal(op));
  for (const std::string& op : chosen)
    if (!usual.contains(op)) code += fmt::format("\n    .fast_kernel({})", literal(op));
  return code;
}

// The options that differ from the defaults.
std::string fp8_code(const Fp8Options& options) {
  const Fp8Options usual;
  std::string code;
  const auto format = [&](const char* setter, c10::ScalarType value,
                          c10::ScalarType default_value) {
    if (value != default_value)
      code += fmt::format(".{}(torch::k{})", setter, c10::toString(value));
  };
  format("forward", options.forward(), usual.forward());
  format("backward", options.backward(), usual.backward());
  if (options.amax_history() != usual.amax_history())
    code += fmt::format(".amax_history({})", options.amax_history());
  if (options.margin() != usual.margin()) code += fmt::format(".margin({})", options.margin());
  if (!options.keep_16bit_params().empty()) {
    std::string globs;
    for (const std::string& glob : options.keep_16bit_params())
      globs.append(globs.empty() ? "" : ", ").append(literal(glob));
    code += fmt::format(".keep_16bit_params({{{}}})", globs);
  }
  return code.empty() ? "\n    .fp8()" : fmt::format("\n    .fp8(Fp8Options(){})", code);
}

std::string_view function_of(CastAction action) {
  return action == CastAction::fp32 ? "keep_fp32" : name_of(action);
}

}  // namespace

// The edits, with one row for an operator whose overloads all have the same edit.
std::vector<std::pair<std::string, CastRow>> CastPolicy::edits_by_name() const {
  std::map<std::string, std::vector<std::string>> overloads;
  for (const auto& [name, row] : edits_) overloads[name.substr(0, name.find('.'))].push_back(name);
  std::vector<std::pair<std::string, CastRow>> edits;
  for (const auto& [base, names] : overloads) {
    const CastRow& first = edits_.at(names.front());
    std::vector<std::string> all;
    for (const auto& op : resolve_operators(base, kPolicyFile))
      all.push_back(display_name(op.operator_name()));
    std::sort(all.begin(), all.end());
    const bool are_equal = std::all_of(names.begin(), names.end(), [&](const std::string& name) {
      const CastRow& row = edits_.at(name);
      return row.action == first.action && row.reason == first.reason;
    });
    if (are_equal && all == names) {
      edits.emplace_back(base, first);
      continue;
    }
    // The overload without a name comes first, since its name sets the others too.
    for (const std::string& name : names) edits.emplace_back(name, edits_.at(name));
  }
  return edits;
}

CastPolicy CastPolicy::from_file(const std::filesystem::path& path, CastTarget target) {
  const Json json = read_json(path);
  const std::string where = "'" + path.string() + "'";
  try {
    require_known_keys(json,
                       {"format", "version", "preset", "operators", "keep_fp32_params", "emulation",
                        "fp8", "fast_kernels", "fast_kernels_on_gpu"},
                       where);
    if (json.at("version") != kPolicyVersion) {
      throw FileError(kPolicyFile, fmt::format("version {} in {}", kPolicyVersion, where),
                      json.at("version").dump().substr(0, 100), "update Semitone");
    }
    CastPolicy policy = by_name(json.at("preset").get<std::string>(), target);
    apply(policy, json, where);
    return policy;
  } catch (const FileError&) {
    throw;
  } catch (const Error& error) {
    throw FileError(kPolicyFile, "a cast policy in " + where, error.what());
  } catch (const Json::exception& error) {
    throw FileError(kPolicyFile, "a cast policy in " + where, error.what(),
                    "docs/cast_policies.md describes the format");
  }
}

std::string CastPolicy::to_json() const {
  Json json{{"format", kPolicyFormat}, {"version", kPolicyVersion}, {"preset", name_}};
  Json& operators = json["operators"] = Json::object();
  for (const auto& [op, row] : edits_by_name()) {
    operators[op] = Json{{"action", amp::name_of(row.action)}};
    if (row.reason != kUserReason) operators[op]["reason"] = row.reason;
  }
  json["keep_fp32_params"] = globs_;
  if (emulation_ != Emulation::automatic) json["emulation"] = amp::name_of(emulation_);
  if (fp8_.has_value()) {
    json["fp8"] = Json{{"forward", dtype_name(fp8_->forward())},
                       {"backward", dtype_name(fp8_->backward())},
                       {"amax_history", fp8_->amax_history()},
                       {"margin", fp8_->margin()},
                       {"keep_16bit_params", fp8_->keep_16bit_params()}};
  }
  if (fast_kernels_ != by_name(name_, target_).fast_kernels_) json["fast_kernels"] = fast_kernels_;
  if (fast_kernels_on_gpu_) json["fast_kernels_on_gpu"] = true;
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

void CastPolicy::save(const std::filesystem::path& path) const {
  write_file(path, to_json() + "\n", kPolicyFile);
}

std::string CastPolicy::to_code() const {
  std::string code = preset_code(*this);
  for (const auto& [op, row] : edits_by_name()) {
    code += fmt::format("\n    .{}({}", function_of(row.action), literal(op));
    code += row.reason == kUserReason ? ")" : fmt::format(", {})", literal(row.reason));
  }
  for (const std::string& glob : globs_)
    code += fmt::format("\n    .keep_fp32_params({})", literal(glob));
  if (emulation_ != Emulation::automatic)
    code += fmt::format("\n    .emulation(Emulation::{})", amp::name_of(emulation_));
  if (fp8_.has_value()) code += fp8_code(*fp8_);
  if (fast_kernels_on_gpu_) code += "\n    .fast_kernels_on_gpu(true)";
  return code + fast_kernels_code(fast_kernels_, by_name(name_, target_).fast_kernels_);
}

}  // namespace semitone::amp
