// Parsers of names and numbers that users write.

#include "apps/semitone/flags.h"
#include "apps/semitone/policy_name.h"
#include "apps/semitone/train_config.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/launch/detail/node_count.h"
#include "src/autocast/op_names.h"
#include "src/core/nearest.h"
#include "src/launch/process_count.h"
#include "src/train/save_interval.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/require.h"
#include "tests/fuzz/targets.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace semitone::fuzz {

void casts(std::string_view input) {
  amp::find_operator(input);
  const std::string name = amp::display_name(input);
  if (name.size() < 100) nearest(name, {"conv2d", "conv2d.padding", "mylib::my_op"});
  try {
    parse_dtype(std::string(input));
  } catch (const Error&) {
  }
}

namespace {

// A command with a flag of every kind.
class Program {
 public:
  Program() : add_(command_, "cli.train") {
    add_.accept_underscores();
    add_.integer("--epochs", integer_, 1, 1'000'000, "");
    add_.number("--lr", number_, [](double x) { return x > 0; }, "above 0", "");
    add_.choice("--opt-level", choice_, {"O0", "O1", "O2", "O3"}, "");
    add_.number_or_word("--loss-scale", {"dynamic"}, [](const std::string&) {}, "");
    add_.text("--data-dir", text_, "DIR", "");
    add_.mark("--verbose", mark_, "");
    add_.json(json_);
    command_.get_option("--json")->configurable(false);
  }

  const CLI::App& command() const { return command_; }

  // @param words  as CLI11 takes them: the last first
  void parse(std::vector<std::string> words) {
    try {
      app_.parse(std::move(words));
    } catch (const CLI::ParseError& error) {
      static_cast<void>(cli::usage_error(app_, error));
    } catch (const cli::UsageError&) {
    }
  }

  // Sets the flags of a file. Returns whether it was accepted.
  bool apply(std::string_view config) {
    try {
      cli::apply_config(command_, memory_file(config));
      return true;
    } catch (const cli::UsageError&) {
    } catch (const FileError&) {
    }
    return false;
  }

 private:
  CLI::App app_;
  CLI::App& command_ = *app_.add_subcommand("train");
  cli::Flags add_;
  std::int64_t integer_ = 1;
  double number_ = 1;
  std::string choice_ = "O1";
  std::string text_;
  std::string json_;
  bool mark_ = false;
};

}  // namespace

void config(std::string_view input) {
  static auto* const program = new Program;
  const bool has_flag = input.size() % 2 == 1;
  program->parse(has_flag ? std::vector<std::string>{"--lr=0.5", "train"}
                          : std::vector<std::string>{"train"});
  if (!program->apply(input)) return;
  // What is written for a file can be read back, with the same values. All values of a file can be
  // written.
  const std::string text = cli::config_text(program->command());
  program->parse({"train"});
  require(program->apply(text), "a file that was written to be accepted");
  require(cli::config_text(program->command()) == text, "the same flags after they were written");
}

void flags(std::string_view input) {
  static auto* const program = new Program;
  std::vector<std::string> words;
  while (!input.empty()) {
    const auto end = std::min(input.find('\n'), input.size());
    words.emplace_back(input.substr(0, end));
    input.remove_prefix(std::min(end + 1, input.size()));
  }
  std::reverse(words.begin(), words.end());
  program->parse(std::move(words));
}

void values(std::string_view input) {
  const std::string text(input);
  const std::vector<std::string> presets{"semitone", "torch", "paddle-o2"};
  accept_or_refuse([&] {
    const bool is_file = cli::names_policy_file(text, presets, "cli.train");
    require(is_file || std::find(presets.begin(), presets.end(), text) != presets.end(),
            "a preset or a file");
  });
  accept_or_refuse(
      [&] { require(launch::ProcessCount::parse(text).count >= 1, "at least one process"); });
  accept_or_refuse([&] {
    const auto nodes = launch::detail::NodeCount::parse(text);
    require(1 <= nodes.min && nodes.min <= nodes.max, "at least one node");
  });
  if (const auto interval = train::parse_save_interval(text)) {
    require(interval->steps == 0 || interval->time.count() == 0, "steps or a time");
    train::describe(*interval);
  }
}

}  // namespace semitone::fuzz
