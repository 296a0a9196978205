#pragma once

#include <CLI/CLI.hpp>

#include <functional>

namespace semitone::cli {

// The action that the command line selects; returns an ExitCode.
using Action = std::function<int()>;

// Each function adds one command, which sets the action when it is selected.
void add_train_command(CLI::App& app, Action& action);
void add_bench_command(CLI::App& app, Action& action);
void add_ops_command(CLI::App& app, Action& action);
void add_launch_command(CLI::App& app, Action& action);
void add_convert_command(CLI::App& app, Action& action);
void add_doctor_command(CLI::App& app, Action& action);
void add_tune_command(CLI::App& app, Action& action);
void add_whatif_command(CLI::App& app, Action& action);
void add_report_command(CLI::App& app, Action& action);
void add_completion_command(CLI::App& app, Action& action);
// The last one: it takes the names of the others.
void add_manual_command(CLI::App& app, Action& action);

}  // namespace semitone::cli
