#include "semitone/autocast/cast_policy.h"
#include "semitone/core/error.h"
#include "src/autocast/op_names.h"
#include "src/autocast/policy_text.h"
#include "src/core/file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
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

constexpr std::uintmax_t kLargestFile = std::uintmax_t{1} << 20;

std::string read_policy(const std::filesystem::path& path) {
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
  return text;
}

std::string literal(std::string_view text) {
  using nlohmann::json;
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
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
  const std::string where = "'" + path.string() + "'";
  const PolicyText text = parse_policy(read_policy(path), where);
  try {
    CastPolicy policy = by_name(text.preset, target);
    for (const auto& [op, row] : text.operators) policy.set(op, row.action, row.reason);
    for (const std::string& glob : text.fp32_param_globs) policy.keep_fp32_params(glob);
    policy.emulation(text.emulation);
    if (text.fp8.has_value()) policy.fp8(*text.fp8);
    policy.fast_kernels_on_gpu(text.fast_kernels_on_gpu);
    if (text.fast_kernels.has_value()) {
      policy.fast_kernels(false);
      for (const std::string& op : *text.fast_kernels) policy.fast_kernel(op);
    }
    return policy;
  } catch (const Error& error) {
    throw FileError(kPolicyFile, "a cast policy in " + where, error.what());
  }
}

std::string CastPolicy::to_json() const {
  PolicyText text{name_, edits_by_name(), globs_, emulation_, fp8_, {}, fast_kernels_on_gpu_};
  if (fast_kernels_ != by_name(name_, target_).fast_kernels_)
    text.fast_kernels.emplace(fast_kernels_.begin(), fast_kernels_.end());
  return to_text(text);
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
