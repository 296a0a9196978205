#pragma once

#include "src/core/native_kernels.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// What a training finds on this machine: `semitone doctor`.
namespace semitone::train {

struct Machine {
  std::string processor;   // "AMD EPYC 7B13"; empty if the system does not say
  int cores = 1;           // that this process may run on
  int physical_cores = 1;  // of these: hyperthreads of a core count as one
  // Cores' worth of time that the process's control group gets; nothing: no limit.
  std::optional<double> cpu_quota;
  int threads = 1;    // of LibTorch
  int all_cores = 1;  // of the machine, or of the virtual one
  double load = 0;    // processes of the machine that ran or waited, the mean of the last minute
  InstructionSet best_set = InstructionSet::baseline;  // of the processor
  InstructionSet set = InstructionSet::baseline;       // that oneDNN may use
  std::string capability;                              // of LibTorch's own kernels: "AVX2"
  std::int64_t memory = 0;                             // bytes; 0 if the system does not say
  std::int64_t available_memory = 0;
  int gpus = 0;                   // that this process may use
  bool libtorch_has_gpu = false;  // whether LibTorch can use them
};

Machine read_machine();

// The minimum of several measurements. The times are in ms, of an fp32 product of two matrices with
// kProductSize rows and columns.
struct MachineSpeed {
  double product_ms = 0;      // on all threads
  double product_ms_one = 0;  // on one
  // Bytes read and written by a copy of memory, 1e9 a second.
  double copy_gb_per_s = 0;
  double copy_gb_per_s_one = 0;
  // TCP on 127.0.0.1, as between ranks of one machine.
  double round_trip_us = 0;
  double loopback_gb_per_s = 0;
};
inline constexpr std::int64_t kProductSize = 1024;

// A result of the examination.
struct Finding {
  bool is_problem = false;
  std::string what;    // with the figures that show it
  std::string remedy;  // empty if there is nothing to do
};

struct OperatorSpeed;

// What the figures mean for a training, problems first, and the recommended opt level and dtype last.
std::vector<Finding> findings_of(const Machine& machine, const MachineSpeed& speed,
                                 const std::vector<OperatorSpeed>& operators);

}  // namespace semitone::train
