#include "src/report/operator_info.h"

#include "src/core/running_statistics.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace semitone::report {
namespace {

// Their results are memory that nothing has been written to.
constexpr std::array<std::string_view, 14> kUninitialised{"_empty_affine_quantized",
                                                          "_resize_output",
                                                          "_resize_output_",
                                                          "empty",
                                                          "empty_like",
                                                          "empty_permuted",
                                                          "empty_quantized",
                                                          "empty_strided",
                                                          "new_empty",
                                                          "new_empty_strided",
                                                          "resize",
                                                          "resize_",
                                                          "resize_as",
                                                          "resize_as_"};

// They change what a tensor is, and no value. The gradients that zero_grad() detaches are those of
// the step before.
constexpr std::array<std::string_view, 12> kChangeNoValue{
    "as_strided_", "detach_",   "record_stream", "rename_", "requires_grad_", "set_",
    "squeeze_",    "swapaxes_", "swapdims_",     "t_",      "transpose_",     "unsqueeze_"};

// They replace the values of self, which may never have been initialised.
constexpr std::array<std::string_view, 11> kOverwriting{
    "bernoulli_",  "cauchy_", "copy_",   "exponential_", "fill_", "geometric_",
    "log_normal_", "normal_", "random_", "uniform_",     "zero_"};

template <typename Values, typename Value>
bool contains(const Values& values, const Value& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

bool writes(const c10::AliasInfo* alias) {
  return alias != nullptr && alias->isWrite();
}

OperatorInfo info_of(const c10::FunctionSchema& schema) {
  OperatorInfo info;
  const std::string base = without_aten(schema.name());
  info.name = base + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  info.returns = schema.returns().size();
  const auto op = c10::Dispatcher::singleton().findSchema(schema.operator_name());
  const auto has = [&](c10::DispatchKey key) {
    return op.has_value() && op->hasKernelForDispatchKey(key);
  };
  const bool may_return_argument = has(c10::DispatchKey::CompositeImplicitAutograd);
  info.is_pointwise = op.has_value() && op->hasTag(at::Tag::pointwise);
  info.is_composite = may_return_argument || (has(c10::DispatchKey::CompositeExplicitAutograd) &&
                                              !has(c10::DispatchKey::CPU));
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    info.arguments.push_back(argument.name());
    if (!writes(argument.alias_info()) && !is_running_statistic(base, argument.name())) continue;
    info.written.push_back(i);
    if (argument.kwarg_only() || contains(kOverwriting, base)) info.overwritten.push_back(i);
  }
  if (contains(kUninitialised, base) || contains(kChangeNoValue, base)) {
    info.written.clear();
    return info;
  }
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    // The second result is a table of logarithms of probabilities, of which many are 0.
    if (base == "_ctc_loss" && i == 1) continue;
    const c10::AliasInfo* const alias = schema.returns()[i].alias_info();
    // contiguous() and the like return an argument or a new tensor.
    if (alias == nullptr || (may_return_argument && !alias->isWrite())) info.results.push_back(i);
  }
  return info;
}

}  // namespace

bool OperatorInfo::writes(std::size_t argument) const {
  return contains(written, argument);
}

bool OperatorInfo::overwrites(std::size_t argument) const {
  return contains(overwritten, argument);
}

const OperatorInfo* operator_of(const at::RecordFunction& record) {
  // A schema and the characters of its name are at the same address as long as its operator is
  // registered. Records that are not of operators have characters of their own.
  using Table = std::unordered_map<const void*, const OperatorInfo*>;
  static thread_local Table seen;
  const auto found = seen.find(record.name());
  if (found != seen.end()) return found->second;
  if (!record.operator_name().has_value()) return nullptr;
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::unordered_map<const void*, std::unique_ptr<const OperatorInfo>>;
  const std::lock_guard lock(*mutex);
  auto& info = (*all)[record.name()];
  if (info == nullptr) info = std::make_unique<OperatorInfo>(info_of(*record.operator_schema()));
  return seen.emplace(record.name(), info.get()).first->second;
}

std::string without_aten(std::string name) {
  constexpr std::string_view kAten = "aten::";
  if (name.rfind(kAten, 0) == 0) name.erase(0, kAten.size());
  return name;
}

std::string without_overload(const std::string& name) {
  return name.substr(0, name.find('.'));
}

}  // namespace semitone::report
