#pragma once

#include <string>
#include <string_view>

namespace semitone::report {

// The files of src/report/page/, which the build puts into the library.
extern const std::string_view kPageHtml;
extern const std::string_view kPageStyle;
extern const std::string_view kPageScript;

// The page with everything in it: style, data and script take the places of the marks <!--CSS-->,
// <!--DATA--> and <!--JS-->.
// @param json  the report. Nothing in it can end the element that holds it.
std::string page_of(std::string_view json);

}  // namespace semitone::report
