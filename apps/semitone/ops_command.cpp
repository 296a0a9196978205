#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/operator_table.h"
#include "apps/semitone/output.h"
#include "apps/semitone/policy_flag.h"
#include "semitone/autocast/cast_policy.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "src/autocast/fast_kernels.h"
#include "src/core/native_kernels.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::cli {
namespace {

constexpr auto kOps = "cli.ops";

struct OpsFlags {
  std::string policy = "semitone";
  std::string device = "cpu";
  std::string dtype = "auto";
  std::string op;
  std::string json;
  bool speed = false;
};

amp::CastTarget target_of(const OpsFlags& flags) {
  const auto device = flags.device == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  return {device, flags.dtype == "auto" ? default_16bit_dtype(device) : parse_dtype(flags.dtype)};
}

// The name in policies: "softmax" for "aten::softmax" and for "softmax.".
std::string plain_name(std::string op) {
  constexpr std::string_view kNamespace = "aten::";
  if (op.starts_with(kNamespace)) op.erase(0, kNamespace.size());
  if (op.ends_with('.')) op.pop_back();
  return op;
}

// UsageError with the nearest names if there is no such operator.
void require_operator(const std::string& op) {
  try {
    amp::CastPolicy::none(c10::DeviceType::CPU).leave(op);
  } catch (const Error& error) {
    const std::string_view message = error.what();
    const auto proposal = message.find("did you mean");
    throw UsageError(kOps, "--op to name an operator", "'" + op + "'",
                     proposal == std::string_view::npos ? "" : message.substr(proposal));
  }
}

// "conv2d" means its overloads too: "conv2d.padding".
std::map<std::string, amp::CastRow> chosen_rows(const amp::CastPolicy& policy,
                                                const std::string& op) {
  if (op.empty()) return policy.rows();
  std::map<std::string, amp::CastRow> rows;
  for (const auto& [name, row] : policy.rows()) {
    if (name == op || name.substr(0, name.find('.')) == op) rows.emplace(name, row);
  }
  return rows;
}

// The kinds of operators that training emulates through fp32.
std::vector<std::string_view> emulated_kinds(const amp::CastPolicy& policy) {
  std::vector<std::string_view> names;
  for (int i = 0; i < kOperatorKinds; ++i) {
    const auto kind = static_cast<OperatorKind>(i);
    if (!trains_natively(policy.device(), policy.dtype(), kind)) names.push_back(name_of(kind));
  }
  return names;
}

// Those that run on the policy's device.
std::set<std::string> fast_kernels(const amp::CastPolicy& policy) {
  std::set<std::string> names = policy.fast_kernels();
  std::erase_if(names, [&](const std::string& name) {
    return !amp::find_fast_kernel(name)->runs_on(policy.device(), policy.fast_kernels_on_gpu());
  });
  return names;
}

std::string json_of(const amp::CastPolicy& policy,
                    const std::map<std::string, amp::CastRow>& rows) {
  auto list = nlohmann::ordered_json::array();
  for (const auto& [op, row] : rows) {
    list.push_back({{"op", op}, {"action", amp::name_of(row.action)}, {"reason", row.reason}});
  }
  const nlohmann::ordered_json object = {{"policy", policy.name()},
                                         {"device", c10::DeviceTypeName(policy.device(), true)},
                                         {"dtype", dtype_name(policy.dtype())},
                                         {"emulated", emulated_kinds(policy)},
                                         {"fast_kernels", fast_kernels(policy)},
                                         {"ops", std::move(list)}};
  return object.dump(2);
}

void print(std::ostream& out, const amp::CastPolicy& policy,
           const std::map<std::string, amp::CastRow>& rows, const OpsFlags& flags) {
  out << fmt::format("policy {} for {} on {}: {} operators listed\n", policy.name(),
                     dtype_name(policy.dtype()), flags.device, policy.rows().size());
  if (!emulated_kinds(policy).empty()) {
    out << fmt::format(
        "{0} on this CPU: {1}\nemulated: computed in float32 and rounded to {0}, since this CPU "
        "has no fast kernel; see --speed\n",
        dtype_name(policy.dtype()), describe_16bit(policy.device(), policy.dtype()));
  }
  if (const auto fast = fast_kernels(policy); !fast.empty())
    out << fmt::format("in Semitone's own kernels: {}\n", fmt::join(fast, ", "));
  out << '\n';
  if (rows.empty()) {
    out << (flags.op.empty() ? "nothing is listed" : flags.op + " is not listed")
        << ": every operator runs in the dtypes of its arguments\n";
    return;
  }
  std::size_t width = 2;
  for (const auto& [op, row] : rows) width = std::max(width, op.size());
  out << bold(out, fmt::format("{:<{}}  {:<7}  {}", "op", width, "action", "reason")) << '\n';
  for (const auto& [op, row] : rows)
    out << fmt::format("{:<{}}  {:<7}  {}\n", op, width, amp::name_of(row.action), row.reason);
}

int run_speed(const CLI::App& command, const OpsFlags& flags) {
  for (const std::string flag : {"--op", "--policy", "--dtype"})
    if (command.count(flag) > 0) throw UsageError(kOps, "--speed or " + flag, "both");
  if (flags.device != "cpu")
    throw UsageError(kOps, "--speed for the CPU", "--device " + flags.device);
  require_json_writable(flags.json);
  const auto speeds = train::measure_operators();
  std::ostream& out = human_output(flags.json);
  out << describe_device(c10::DeviceType::CPU) << "\n\n";
  cli::print(out, speeds);
  const nlohmann::ordered_json object = {{"device", describe_device(c10::DeviceType::CPU)},
                                         {"speed", to_json(speeds)}};
  write_json(flags.json, flags.json.empty() ? "" : object.dump(2));
  return kSuccess;
}

int run(const CLI::App& command, OpsFlags flags) {
  require_two_files(kOps, {"--policy", flags.policy}, {"--json", flags.json});
  if (flags.speed) return run_speed(command, flags);
  const bool is_about_one = !flags.op.empty();
  flags.op = plain_name(flags.op);
  const auto policy = policy_of(flags.policy, target_of(flags), kOps);
  if (is_about_one) require_operator(flags.op);
  const auto rows = chosen_rows(policy, flags.op);
  print(human_output(flags.json), policy, rows, flags);
  write_json(flags.json, flags.json.empty() ? "" : json_of(policy, rows));
  return kSuccess;
}

constexpr auto kOpsFooter = R"(Actions:
  lower    cast to the 16-bit dtype           fp32    cast to float32
  promote  16 bits unless an argument is fp32 widest  cast to the widest argument
  leave    no cast                            ban     an error if an argument is 16-bit
An operator that is not listed runs in the dtypes of its arguments.

Examples:
  semitone ops
  semitone ops --policy torch --device cuda
  semitone ops --op softmax
  semitone ops --policy apex --json apex.json
  semitone ops --speed

)";

}  // namespace

void add_ops_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "ops", "Print a cast policy: what autocast does with each operator, and why");
  const auto flags = std::make_shared<OpsFlags>();
  Flags add(command, kOps);
  add.text("--policy", flags->policy, kPolicyType, "Cast policy to print: " + policy_choices());
  add.choice("--device", flags->device, {"cpu", "cuda"},
             "Device of the table; the machine need not have it");
  add.choice("--dtype", flags->dtype, {"auto", "bf16", "fp16"},
             "The 16-bit dtype; auto: bf16 on a CPU, else fp16");
  add.text("--op", flags->op, "NAME", "Print only this operator and its overloads");
  add.mark("--speed", flags->speed,
           "Measure each kind of operator on this CPU, in float32 and in 16 bits, native and "
           "emulated");
  add.json(flags->json);
  command.footer(std::string(kOpsFooter) + kExitCodesHelp);
  command.callback(
      [&action, &command, flags] { action = [&command, flags] { return run(command, *flags); }; });
}

}  // namespace semitone::cli
