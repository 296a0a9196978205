#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/machine_speed.h"
#include "apps/semitone/operator_table.h"
#include "apps/semitone/output.h"
#include "semitone/core/device.h"
#include "semitone/core/version.h"
#include "src/train/machine.h"
#include "src/train/operator_speed.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace semitone::cli {
namespace {

using nlohmann::ordered_json;
using train::Finding;
using train::Machine;
using train::MachineSpeed;
using train::OperatorSpeed;

constexpr double kGiga = 1e9;
constexpr double kProductFlops =
    2.0 * train::kProductSize * train::kProductSize * train::kProductSize;

double gflops(double ms) {
  return kProductFlops / kGiga / (ms / 1e3);
}

ordered_json json_of(const Machine& machine) {
  ordered_json quota;
  if (machine.cpu_quota.has_value()) quota = *machine.cpu_quota;
  return {{"processor", machine.processor},
          {"device", describe_device(c10::DeviceType::CPU)},
          {"cores", machine.cores},
          {"physical_cores", machine.physical_cores},
          {"cpu_quota", std::move(quota)},
          {"threads", machine.threads},
          {"load", machine.load},
          {"instruction_set", name_of(machine.set)},
          {"processor_instruction_set", name_of(machine.best_set)},
          {"libtorch_capability", machine.capability},
          {"memory_bytes", machine.memory},
          {"available_memory_bytes", machine.available_memory},
          {"gpus", machine.gpus},
          {"libtorch_has_gpu", machine.libtorch_has_gpu}};
}

ordered_json json_of(const MachineSpeed& speed) {
  return {{"product_size", train::kProductSize},
          {"product_ms", speed.product_ms},
          {"product_ms_one_thread", speed.product_ms_one},
          {"copy_gb_per_s", speed.copy_gb_per_s},
          {"copy_gb_per_s_one_thread", speed.copy_gb_per_s_one},
          {"loopback_round_trip_us", speed.round_trip_us},
          {"loopback_gb_per_s", speed.loopback_gb_per_s}};
}

ordered_json json_of(const std::vector<Finding>& findings) {
  auto list = ordered_json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"kind", finding.is_problem ? "problem" : "recommendation"},
                    {"what", finding.what},
                    {"remedy", finding.remedy}});
  }
  return list;
}

void print(std::ostream& out, const Machine& machine, const MachineSpeed& speed) {
  out << fmt::format("semitone {}, LibTorch {}\n", version(), libtorch_version());
  if (!machine.processor.empty()) out << machine.processor << '\n';
  out << describe_device(c10::DeviceType::CPU) << '\n';
  out << fmt::format("{} cores for this process, {:.1f} GB of memory, of which {:.1f} are free\n\n",
                     machine.cores, static_cast<double>(machine.memory) / kGiga,
                     static_cast<double>(machine.available_memory) / kGiga);
  constexpr auto kRow = "{:<26}  {:>14}  {:>14}\n";
  out << bold(out, fmt::format("{:<26}  {:>14}  {:>14}", "measured",
                               fmt::format("{} threads", machine.threads), "1 thread"))
      << '\n';
  out << fmt::format(kRow, "float32 products",
                     fmt::format("{:.0f} GFLOP/s", gflops(speed.product_ms)),
                     fmt::format("{:.0f} GFLOP/s", gflops(speed.product_ms_one)));
  out << fmt::format(kRow, "copy of memory", fmt::format("{:.1f} GB/s", speed.copy_gb_per_s),
                     fmt::format("{:.1f} GB/s", speed.copy_gb_per_s_one));
  out << fmt::format(kRow, "TCP on 127.0.0.1", "",
                     fmt::format("{:.1f} GB/s", speed.loopback_gb_per_s));
  out << fmt::format(kRow, "round trip on 127.0.0.1", "",
                     fmt::format("{:.0f} us", speed.round_trip_us));
  out << '\n';
}

void print(std::ostream& out, const std::vector<Finding>& findings) {
  out << '\n';
  for (const Finding& finding : findings) {
    out << bold(out, finding.is_problem ? "problem:        " : "recommendation: ") << finding.what;
    if (!finding.remedy.empty()) out << "\n                " << finding.remedy;
    out << '\n';
  }
}

int run(const std::string& json) {
  require_json_writable(json);
  const Machine machine = train::read_machine();
  const MachineSpeed speed = measure_machine();
  const std::vector<OperatorSpeed> operators = train::measure_operators();
  const std::vector<Finding> findings = train::findings_of(machine, speed, operators);
  std::ostream& out = human_output(json);
  print(out, machine, speed);
  cli::print(out, operators);
  print(out, findings);
  const ordered_json object = {{"semitone", version()},           {"libtorch", libtorch_version()},
                               {"machine", json_of(machine)},     {"speed", json_of(speed)},
                               {"operators", to_json(operators)}, {"findings", json_of(findings)}};
  write_json(json, json.empty() ? "" : object.dump(2));
  return kSuccess;
}

constexpr auto kDoctorFooter =
    R"(It takes some 15 seconds. Figures are the best of several: run it while nothing else runs. Times of operators are
those of `semitone ops --speed`.

Examples:
  semitone doctor
  OMP_NUM_THREADS=1 semitone doctor --json doctor.json

)";

}  // namespace

void add_doctor_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "doctor",
      "Examine this machine: what it has, how fast it is, what slows it down, and which opt level "
      "suits it");
  const auto json = std::make_shared<std::string>();
  Flags add(command, "cli.doctor");
  add.json(*json);
  command.footer(std::string(kDoctorFooter) + kExitCodesHelp);
  command.callback([&action, json] { action = [json] { return run(*json); }; });
}

}  // namespace semitone::cli
