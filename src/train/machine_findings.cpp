// What the figures of a machine mean. The limits are stated where they are used.

#include "semitone/core/dtype.h"
#include "src/core/counted.h"
#include "src/train/machine.h"
#include "src/train/operator_speed.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace semitone::train {
namespace {

// Less does not pay for the casts.
constexpr double kLeastGain = 1.2;

// How often a 16-bit dtype is as fast as fp32 in training, with the kernels that Semitone chooses.
struct Gain {
  double products = 0;
  double convolutions = 0;

  // A model is of one kind or the other; the lower figure promises nothing that the other kind of
  // model does not get.
  double least() const { return std::min(products, convolutions); }
  double most() const { return std::max(products, convolutions); }
};

const OperatorSpeed* find(const std::vector<OperatorSpeed>& operators, OperatorKind kind,
                          c10::ScalarType dtype) {
  const auto found =
      std::find_if(operators.begin(), operators.end(), [&](const OperatorSpeed& one) {
        return one.kind == kind && one.dtype == dtype && one.training;
      });
  return found == operators.end() ? nullptr : &*found;
}

double gain_of(const OperatorSpeed* speed) {
  return speed == nullptr || speed->chosen_ms() <= 0 ? 0 : speed->fp32_ms / speed->chosen_ms();
}

Gain gain_of(const std::vector<OperatorSpeed>& operators, c10::ScalarType dtype) {
  return {gain_of(find(operators, OperatorKind::product, dtype)),
          gain_of(find(operators, OperatorKind::convolution, dtype))};
}

using Findings = std::vector<Finding>;

void add_problem(Findings& findings, std::string what, std::string remedy) {
  findings.push_back({true, std::move(what), std::move(remedy)});
}

void find_thread_problems(const Machine& machine, const MachineSpeed& speed, Findings& findings) {
  if (machine.threads > machine.cores) {
    add_problem(findings,
                fmt::format("LibTorch computes with {} threads on {} cores", machine.threads,
                            machine.cores),
                fmt::format("set OMP_NUM_THREADS={}", machine.cores));
  }
  if (machine.cpu_quota.has_value() && *machine.cpu_quota < machine.threads) {
    const auto whole = std::max(1, static_cast<int>(std::floor(*machine.cpu_quota)));
    add_problem(findings,
                fmt::format("the control group grants the time of {:.3g} cores, and LibTorch "
                            "computes with {} threads, which then stop together",
                            *machine.cpu_quota, machine.threads),
                fmt::format("set OMP_NUM_THREADS={}, or raise the limit", whole));
  }
  // The measurement itself adds little to the mean of a minute.
  if (machine.load > 0.5 * machine.all_cores) {
    add_problem(findings,
                fmt::format("other programs use the machine: {:.1f} processes ran or waited during "
                            "the last minute, on {} cores",
                            machine.load, machine.all_cores),
                "measure again on an idle machine, which is faster than the figures above say");
  }
  if (2 * machine.threads <= machine.physical_cores &&
      !(machine.cpu_quota.has_value() && *machine.cpu_quota < 2 * machine.threads)) {
    add_problem(
        findings,
        fmt::format("LibTorch computes with {} of {} cores", machine.threads,
                    machine.physical_cores),
        fmt::format("set OMP_NUM_THREADS={}, unless each of several processes has its share of the "
                    "cores",
                    machine.physical_cores));
  }
  // Two threads on two hyperthreads of a core reach 1.0 to 1.3.
  const double scaling = speed.product_ms_one / speed.product_ms;
  if (machine.threads > 1 && scaling < 0.9) {
    add_problem(findings,
                fmt::format("a product takes {:.1f} ms on {} threads and {:.1f} ms on one",
                            speed.product_ms, machine.threads, speed.product_ms_one),
                "stop other programs, or set OMP_NUM_THREADS=1 or GOMP_SPINCOUNT=10000: threads "
                "wait for those that other programs delay");
  }
}

void find_limits(const Machine& machine, Findings& findings) {
  if (machine.set != machine.best_set) {
    add_problem(findings,
                fmt::format("ONEDNN_MAX_CPU_ISA limits oneDNN to {}, and the processor has {}",
                            name_of(machine.set), name_of(machine.best_set)),
                "unset it, unless numbers of a lesser processor are wanted");
  }
  if (machine.gpus > 0 && !machine.libtorch_has_gpu) {
    add_problem(findings,
                fmt::format("{} that this LibTorch cannot use", counted(machine.gpus, "GPU")),
                "build with PRESET=cuda (docs/gpu.md)");
  }
}

// Kernels of LibTorch that are slower than the other way to compute the same numbers.
void find_slow_kernels(const std::vector<OperatorSpeed>& operators, Findings& findings) {
  for (const OperatorSpeed& speed : operators) {
    if (!speed.training || !speed.native_ms.has_value() || speed.emulated_ms <= 0) continue;
    // On a busy machine times vary by a factor of two.
    if (speed.is_native && *speed.native_ms > 3 * speed.emulated_ms) {
      add_problem(findings,
                  fmt::format("{} in {} take {:.2f} ms in LibTorch's kernel, which Semitone uses "
                              "here, and {:.2f} ms through float32",
                              name_of(speed.kind), dtype_name(speed.dtype), *speed.native_ms,
                              speed.emulated_ms),
                  "CastPolicy::emulation(Emulation::always), if this repeats");
    }
    if (!speed.is_native && 3 * *speed.native_ms < speed.emulated_ms) {
      add_problem(findings,
                  fmt::format("{} in {} take {:.2f} ms through float32, which Semitone uses here, "
                              "and {:.2f} ms in LibTorch's kernel",
                              name_of(speed.kind), dtype_name(speed.dtype), speed.emulated_ms,
                              *speed.native_ms),
                  "CastPolicy::emulation(Emulation::never), if this repeats");
    }
  }
}

Finding recommend_for_cpu(const std::vector<OperatorSpeed>& operators) {
  const Gain bf16 = gain_of(operators, at::kBFloat16);
  const Gain fp16 = gain_of(operators, at::kHalf);
  // Of those that gain for one kind of model at least, that which loses least for the other.
  const auto worth = [](const Gain& gain) { return gain.most() < kLeastGain ? 0 : gain.least(); };
  const bool prefers_bf16 = worth(bf16) >= worth(fp16);
  const Gain& best = prefers_bf16 ? bf16 : fp16;
  const std::string figures = fmt::format(
      "in training, {} products are {:.2g} times as fast as float32's, and convolutions "
      "{:.2g} times",
      prefers_bf16 ? "bfloat16" : "float16", best.products, best.convolutions);
  if (best.most() < kLeastGain) {
    return {false, figures,
            "O0 is the fastest level on this processor; O1 to O3 show what 16 bits do to a model, "
            "with the numbers of a processor that has such kernels"};
  }
  const char* const dtype = prefers_bf16 ? "bf16" : "fp16";
  return {
      false, figures,
      fmt::format("train with --opt-level O1 --dtype {0}, or O2 for the least memory traffic of "
                  "large models; compare both with semitone bench",
                  dtype)};
}

}  // namespace

std::vector<Finding> findings_of(const Machine& machine, const MachineSpeed& speed,
                                 const std::vector<OperatorSpeed>& operators) {
  Findings findings;
  find_thread_problems(machine, speed, findings);
  find_limits(machine, findings);
  find_slow_kernels(operators, findings);
  if (machine.gpus > 0 && machine.libtorch_has_gpu) {
    findings.push_back(
        {false,
         fmt::format("{} that LibTorch can use; not measured here", counted(machine.gpus, "GPU")),
         "train with --device cuda --opt-level O1, or O2 for the least memory; "
         "compare both with semitone bench --device cuda"});
  } else {
    findings.push_back(recommend_for_cpu(operators));
  }
  return findings;
}

}  // namespace semitone::train
