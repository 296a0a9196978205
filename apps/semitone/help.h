#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>

// The output of --help, as wide as the terminal.
namespace semitone::cli {

// Breaks a text between words into lines of at most this many columns. All lines except the first
// are indented by this many spaces.
std::string wrapped(std::string_view text, std::size_t columns, std::size_t indent = 0);

// The end of a --help page. Lines that begin with two spaces are kept if there is room:
// "  a command   description"; others are paragraphs.
std::string wrapped_footer(std::string_view footer, std::size_t columns);

// The help formatter of all commands.
class Help : public CLI::Formatter {
 public:
  Help();

  std::string make_option(const CLI::Option* option, bool positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_usage(const CLI::App* command, std::string name) const override;
  std::string make_description(const CLI::App* command) const override;
  std::string make_footer(const CLI::App* command) const override;

 protected:
  std::size_t columns() const { return columns_; }

 private:
  std::string entry(const std::string& name, const std::string& text) const;

  std::size_t columns_;
};

}  // namespace semitone::cli
