#pragma once

#include "semitone/launch/launch_options.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <memory>
#include <string>

namespace semitone::cli {

// The command line of `semitone launch`. Words after the program's name belong to the program.
struct LaunchFlags {
  std::string nproc_per_node = "1";
  std::string nnodes = "1";
  std::int64_t node_rank = 0;
  std::string master_addr;
  std::int64_t master_port = 0;
  std::string rdzv_backend;
  std::string rdzv_endpoint;
  std::string rdzv_id;
  std::string rdzv_token_file;
  bool standalone = false;
  std::string local_addr;
  std::int64_t max_restarts = 0;
  std::string role = "default";
  std::string log_dir;
  std::string redirects = "0";
  std::string tee = "0";
  double grace = 10;
  double heartbeat_timeout = 30;
  double join_timeout = 600;
  double last_call = 5;
  double monitor_interval = 0.1;  // torchrun's; we are told at once
  bool no_python = false;         // torchrun's; nothing here is run with Python
  std::string json;
};

std::shared_ptr<const LaunchFlags> add_launch_flags(CLI::App& command);

// The library's options for the flags. UsageError if they are invalid.
launch::LaunchOptions options_of(const LaunchFlags& flags, const CLI::App& command);

// The reason for the number of processes, if the flags do not give a number; else empty.
std::string reason_for_processes(const LaunchFlags& flags);

}  // namespace semitone::cli
