#include "src/report/page.h"

namespace semitone::report {
namespace {

// In JSON, "<" occurs in texts only, where its escape means the same. Without it no text ends the
// element, or begins a comment that hides its end.
std::string without_tags(std::string_view json) {
  std::string text;
  text.reserve(json.size());
  for (const char letter : json) {
    if (letter == '<') {
      text += "\\u003c";
    } else {
      text += letter;
    }
  }
  return text;
}

// Moves what comes before a mark to the page, with the replacement.
void append_up_to(std::string& page, std::string_view& rest, std::string_view mark,
                  std::string_view replacement) {
  const std::size_t place = rest.find(mark);
  page.append(rest.substr(0, place)).append(replacement);
  rest.remove_prefix(place + mark.size());
}

}  // namespace

std::string page_of(std::string_view json) {
  std::string page;
  std::string_view rest = kPageHtml;
  append_up_to(page, rest, "<!--CSS-->", "<style>\n" + std::string(kPageStyle) + "</style>");
  append_up_to(
      page, rest, "<!--DATA-->",
      "<script type=\"application/json\" id=\"report\">" + without_tags(json) + "</script>");
  append_up_to(page, rest, "<!--JS-->", "<script>\n" + std::string(kPageScript) + "</script>");
  return page.append(rest);
}

}  // namespace semitone::report
