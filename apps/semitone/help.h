#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>

// What --help prints, as wide as the terminal and no wider.
namespace semitone::cli {

// The text in lines of at most so many columns, broken between words. All but the first begin with
// so many spaces.
std::string wrapped(std::string_view text, std::size_t columns, std::size_t indent = 0);

// The end of a --help page. Lines that begin with two spaces are kept where there is room for them:
// "  a command   what it does"; others are paragraphs.
std::string wrapped_footer(std::string_view footer, std::size_t columns);

// Every command's.
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
