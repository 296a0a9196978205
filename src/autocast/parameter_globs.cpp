#include "src/autocast/parameter_globs.h"

#include "semitone/core/error.h"
#include "src/core/nearest.h"

#include <fnmatch.h>

namespace semitone::amp {

std::vector<std::size_t> matching(const std::string& glob, const std::vector<std::string>& names,
                                  std::string_view component) {
  std::vector<std::size_t> found;
  found.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (fnmatch(glob.c_str(), names[i].c_str(), 0) == 0) found.push_back(i);
  }
  if (!found.empty()) return found;
  const std::string near = nearest(glob, names);
  throw Error(component, "a parameter that matches '" + glob + "'",
              "none among " + std::to_string(names.size()) + " parameters",
              near.empty() ? (names.empty() ? "" : "the first is called '" + names.front() + "'")
                           : "did you mean " + near + "?");
}

}  // namespace semitone::amp
