// Parsers of names and numbers that users write.

#include "apps/semitone/flags.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/op_names.h"
#include "src/core/nearest.h"
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
  }

  // @param words  as CLI11 takes them: the last first
  void parse(std::vector<std::string> words) {
    try {
      app_.parse(std::move(words));
    } catch (const CLI::ParseError& error) {
      static_cast<void>(cli::usage_error(app_, error));
    } catch (const cli::UsageError&) {
    }
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

}  // namespace semitone::fuzz
