#include "apps/semitone/manual.h"

#include <fmt/format.h>

#include <cctype>
#include <sstream>
#include <string_view>

namespace semitone::cli {
namespace {

// man takes a backslash, and a dot or an apostrophe at the beginning of a line, for its own. A plain
// minus sign would become a hyphen, which a terminal does not take for a flag.
std::string escaped(std::string_view text) {
  std::string result;
  if (text.starts_with('.') || text.starts_with('\'')) result = "\\&";
  for (const char letter : text) {
    if (letter == '\\') {
      result += "\\e";
    } else if (letter == '-') {
      result += "\\-";
    } else if (letter == '|') {
      result += "|\\:";  // a line may end here
    } else {
      result += letter;
    }
  }
  return result;
}

std::string in_capitals(std::string text) {
  for (char& letter : text)
    letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  return text;
}

std::string page_name(const CommandEntry& command, const CommandEntry& program) {
  return &command == &program ? program.name : program.name + "-" + command.name;
}

std::string flag_item(const FlagEntry& flag) {
  std::string item = ".TP\n";
  for (const std::string& name : flag.names) {
    if (&name != &flag.names.front()) item += ", ";
    item += (flag.is_argument() ? "\\fI" : "\\fB") + escaped(name) + "\\fR";
  }
  const bool has_type = !flag.type.empty() && !flag.is_argument();
  if (has_type) item += " \\fI" + escaped(flag.type) + "\\fR";
  item += "\n" + escaped(flag.help);
  if (flag.is_argument() && flag.value == Value::choice) item += ": " + escaped(flag.type);
  // A path of the machine that made the page says nothing elsewhere.
  if (!flag.fallback.empty() && !flag.fallback.starts_with('/'))
    item += ". Default: " + escaped(flag.fallback);
  return item + "\n";
}

// Paragraphs of the footer. "Examples:" and the like are headings, lines that begin with two spaces
// are as they are.
std::string footer_sections(const std::string& footer) {
  std::string result;
  bool is_literal = false;
  const auto end_literal = [&] {
    if (is_literal) result += ".fi\n.RE\n";
    is_literal = false;
  };
  std::istringstream lines(footer);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("  ")) {
      if (!is_literal) result += ".RS\n.nf\n";
      is_literal = true;
      result += escaped(std::string_view(line).substr(2)) + "\n";
      continue;
    }
    end_literal();
    if (line.empty()) {
      result += ".PP\n";
    } else if (line.ends_with(':') && line.find(' ') == line.npos) {
      result += ".SH " + in_capitals(line.substr(0, line.size() - 1)) + "\n";
    } else if (constexpr std::string_view kCodes = "Exit codes: "; line.starts_with(kCodes)) {
      result += ".SH EXIT STATUS\n" + escaped(std::string_view(line).substr(kCodes.size())) + "\n";
    } else {
      result += escaped(line) + "\n";
    }
  }
  end_literal();
  return result;
}

std::string synopsis(const CommandEntry& command, const CommandEntry& program) {
  std::string text = "\\fB" + program.name;
  if (&command == &program) return text + "\\fR \\fICOMMAND\\fR [\\fIFLAGS\\fR]\n";
  text += " " + command.name + "\\fR [\\fIFLAGS\\fR]";
  for (const FlagEntry& flag : command.flags)
    if (flag.is_argument()) text += " \\fI" + escaped(flag.names.front()) + "\\fR";
  if (command.runs_program) text += " \\fIPROGRAM\\fR [\\fIARGUMENTS...\\fR]";
  return text + "\n";
}

}  // namespace

std::string manual_page(const CommandEntry& command, const std::vector<CommandEntry>& commands,
                        const std::string& version) {
  const CommandEntry& program = commands.front();
  const std::string name = page_name(command, program);
  std::string page = fmt::format(".TH {} 1 \"\" \"semitone {}\" \"User Commands\"\n.nh\n.ad l\n",
                                 in_capitals(name), version);
  page += fmt::format(".SH NAME\n{} \\- {}\n", escaped(name), escaped(command.help));
  page += ".SH SYNOPSIS\n" + synopsis(command, program);
  if (&command == &program) {
    page += ".SH COMMANDS\n";
    for (const CommandEntry& one : commands) {
      if (&one != &program)
        page += fmt::format(".TP\n\\fB{}\\fR\n{}. See {}(1).\n", one.name, escaped(one.help),
                            escaped(page_name(one, program)));
    }
  }
  page += ".SH OPTIONS\n";
  for (const FlagEntry& flag : command.flags) page += flag_item(flag);
  if (&command != &program && !command.footer.empty()) page += ".SH NOTES\n";
  page += footer_sections(command.footer);
  if (&command != &program) page += fmt::format(".SH SEE ALSO\n{}(1)\n", escaped(program.name));
  return page;
}

}  // namespace semitone::cli
